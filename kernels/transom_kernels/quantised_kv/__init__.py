"""Quantised KV caches: keys and values in 8 or 4 bits, with a scale for each key and each value of a token and KV head."""

from transom_kernels.quantised_kv.format import (
    FORMATS,
    STORED,
    KvFormat,
    check_cache,
    check_kv,
    format_of,
    head_width,
    is_packed,
    refuse_old_device,
)
from transom_kernels.quantised_kv.reference import dequantise_rows, quantise_rows

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
