"""Quantised KV caches: keys and values in 8 or 4 bits, with a scale for each key and each value of a token and KV head."""

from transom_kernels.quantised_kv.format import (
    FORMATS,
    STORED,
    KvFormat,
    check_cache,
    check_kv,
    dequantise_rows,
    format_of,
    head_width,
    is_packed,
    quantise_rows,
    refuse_old_device,
)

__all__ = [
    "FORMATS",
    "STORED",
    "KvFormat",
    "check_cache",
    "check_kv",
    "dequantise_rows",
    "format_of",
    "head_width",
    "is_packed",
    "quantise_rows",
    "refuse_old_device",
]
