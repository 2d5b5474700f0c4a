"""The CPU kernel of gated activations, in numba: out[t, n] = activation(gate[t, n]) * up[t, n]. `cpu.py` launches it.

Legend: T tokens, N inner width.
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
    keep_nan,
    sigmoid,
    splat,
    vector_max,
    vector_min,
)
from transom_kernels.cpu.work import argument, claim, finish, helper

_SQRT_2_OVER_PI = 0.7978845608028654


def make_activate(dtype: str, activation: str, limited: bool) -> Any:
    """An item is a part of one row. With `limited` gates are at most `limit`, and ups in [-limit, limit].

    Arguments: 0 gate, 1 up, 2 out, contiguous, 3 N, 4 width of an item, a multiple of 16, 5 gate's row stride in bytes, 6 up's,
    7 limit.
    """
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    store, store_part = STORE[dtype], STORE_PART[dtype]

    @helper
    def activated(gate, up, limit):  # type: ignore[no-untyped-def]
        if limited:
            gate = keep_nan(vector_min(gate, limit), gate)
            up = keep_nan(vector_min(vector_max(up, splat(0.0) - limit), limit), up)
        if activation == "silu":
            return gate * sigmoid(gate) * up
        cubic = fma(gate * gate * gate, splat(0.044715), gate)
        return gate * sigmoid(cubic * splat(2.0 * _SQRT_2_OVER_PI)) * up  # (1 + tanh(x)) / 2 = sigmoid(2 x)

    def activate(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            width, step = argument(arguments, 3), argument(arguments, 4)
            limit = splat(float_of_bits(argument(arguments, 7)))
            parts = (width + step - 1) // step
            row, first = item // parts, item % parts * step
            gate = argument(arguments, 0) + row * argument(arguments, 5)
            up = argument(arguments, 1) + row * argument(arguments, 6)
            out = argument(arguments, 2) + row * width * size
            last = min(first + step, width)
            full = last // 16 * 16
            for n in range(first, full, 16):
                store(out + n * size, activated(load(gate + n * size), load(up + n * size), limit))
            if last > full:
                at, rest = full * size, last - full
                store_part(out + at, activated(load_part(gate + at, rest), load_part(up + at, rest), limit), rest)
            finish(thread)
            item = claim(thread)

    return activate
