"""Quantised KV caches: keys and values of 8 or 4 bits, with one scale per token and KV head for keys and one for values."""

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
