"""The CPU kernel of LayerNorm, in numba. `cpu.py` launches it.

Legend: T rows, N width.
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
    keep_part,
    lane_sum,
    splat,
    sqrt,
)
from transom_kernels.cpu.work import argument, claim, finish, helper


def make_layer_norm(dtype: str) -> Any:
    """out = (x - mean) / sqrt(variance + eps) * weight, in three passes over a row. An item is some rows.

    Arguments: 0 x, 1 weight, 2 out, contiguous, 3 T, 4 rows of an item, 5 N, 6 x's row stride in bytes, 7 eps.
    """
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    store, store_part = STORE[dtype], STORE_PART[dtype]

    @helper
    def normalise(x, weight, out, width, eps):  # type: ignore[no-untyped-def]
        full, rest = width // 16 * 16, width % 16
        total = splat(0.0)
        for k in range(0, full, 16):
            total = total + load(x + k * size)
        if rest:
            total = total + load_part(x + full * size, rest)
        mean = splat(lane_sum(total) / width)
        total = splat(0.0)
        for k in range(0, full, 16):
            centred = load(x + k * size) - mean
            total = fma(centred, centred, total)
        if rest:
            centred = keep_part(load_part(x + full * size, rest) - mean, rest, 0.0)
            total = fma(centred, centred, total)
        scale = splat(1.0 / sqrt(lane_sum(total) / width + eps))
        for k in range(0, full, 16):
            store(out + k * size, (load(x + k * size) - mean) * scale * load(weight + k * size))
        if rest:
            lanes = (load_part(x + full * size, rest) - mean) * scale * load_part(weight + full * size, rest)
            store_part(out + full * size, lanes, rest)

    def layer_norm(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            width, eps = argument(arguments, 5), float_of_bits(argument(arguments, 7))
            first = item * argument(arguments, 4)
            for row in range(first, min(first + argument(arguments, 4), argument(arguments, 3))):
                x = argument(arguments, 0) + row * argument(arguments, 6)
                normalise(x, argument(arguments, 1), argument(arguments, 2) + row * width * size, width, eps)
            finish(thread)
            item = claim(thread)

    return layer_norm
