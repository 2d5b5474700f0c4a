"""The CPU kernel of `position_scale`, in numba. `cpu.py` launches it.

Legend: T tokens.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import (
    NUM_BYTES,
    STORE_PART,
    float_of_bits,
    fma,
    load_i64,
    logarithm,
    splat,
    vector_floor,
)
from transom_kernels.cpu.work import argument, claim, finish


def make_position_scale(dtype: str) -> Any:
    """out[t] = 1 + factor * log(1 + floor((positions[t] + 1) / interval)). An item is some tokens.

    Arguments: 0 positions [T] int64, 1 out [T], 2 T, 3 tokens of an item, 4 factor, 5 interval.
    """
    store_part, size = STORE_PART[dtype], NUM_BYTES[dtype]

    def position_scale(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            factor, interval = (
                splat(float_of_bits(argument(arguments, 4))),
                splat(float_of_bits(argument(arguments, 5))),
            )
            first = item * argument(arguments, 3)
            for token in range(first, min(first + argument(arguments, 3), argument(arguments, 2))):
                next_position = splat(load_i64(argument(arguments, 0) + token * 8)) + splat(1.0)
                intervals = vector_floor(next_position / interval)
                value = fma(logarithm(intervals + splat(1.0)), factor, splat(1.0))
                store_part(argument(arguments, 1) + token * size, value, 1)
            finish(thread)
            item = claim(thread)

    return position_scale
