"""RMS normalisation of rows for CPUs, in numba: an item is a row. `cpu.py` launches it.

Legend: N width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    STORE,
    STORE_PART,
    float_of_bits,
    fma,
    lane_sum,
    splat,
    sqrt,
)
from transom_kernels.cpu.work import argument, claim, finish


def make_rms_norm(dtype: str, weight_dtype: str) -> Any:
    """Arguments: x, weight, out, N, x's row stride in bytes, out's row stride in bytes, eps."""
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    store, store_part = STORE[dtype], STORE_PART[dtype]
    load_weight, load_weight_part, weight_size = LOAD[weight_dtype], LOAD_PART[weight_dtype], NUM_BYTES[weight_dtype]

    def rms_norm(arguments, thread):  # type: ignore[no-untyped-def]
        row = claim(thread)
        while row >= 0:
            width = argument(arguments, 3)
            x, weight = argument(arguments, 0) + row * argument(arguments, 4), argument(arguments, 1)
            out = argument(arguments, 2) + row * argument(arguments, 5)
            full, rest = width // 16 * 16, width % 16
            total = splat(0.0)
            for k in range(0, full, 16):
                lanes = load(x + k * size)
                total = fma(lanes, lanes, total)
            if rest:
                lanes = load_part(x + full * size, rest)
                total = fma(lanes, lanes, total)
            scale = splat(1.0 / sqrt(lane_sum(total) / width + float_of_bits(argument(arguments, 6))))
            for k in range(0, full, 16):
                store(out + k * size, load(x + k * size) * scale * load_weight(weight + k * weight_size))
            if rest:
                lanes = load_part(x + full * size, rest) * scale * load_weight_part(weight + full * weight_size, rest)
                store_part(out + full * size, lanes, rest)
            finish(thread)
            row = claim(thread)

    return rms_norm
