"""The CPU kernels of rotary position embedding (RoPE), in numba: the tables of a step, and the rotation of heads in place.
`cpu.py` launches them.

Legend: T tokens, H heads, R rotated width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.rows import make_rotate
from transom_kernels.cpu.simd import (
    NUM_BYTES,
    STORE_PART,
    cosine,
    float_of_bits,
    load_i64,
    load_part_f32,
    sine,
    splat,
)
from transom_kernels.cpu.work import argument, claim, finish


def make_tables(dtype: str) -> Any:
    """cos[t, r] = cos(positions[t] * frequency[r]) * scale; signed_sin likewise, times sign[r]. An item is some tokens.

    Arguments: 0 positions [T] int64, 1 frequency [R] float32, 2 sign [R] float32, 3 cos, 4 signed_sin, both contiguous [T, R],
    5 T, 6 tokens of an item, 7 R, 8 scale.
    """
    store_part, size = STORE_PART[dtype], NUM_BYTES[dtype]

    def tables(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            width, scale = argument(arguments, 7), splat(float_of_bits(argument(arguments, 8)))
            first = item * argument(arguments, 6)
            for token in range(first, min(first + argument(arguments, 6), argument(arguments, 5))):
                position = splat(load_i64(argument(arguments, 0) + token * 8))
                for r in range(0, width, 16):
                    count = min(width - r, 16)
                    angle = position * load_part_f32(argument(arguments, 1) + r * 4, count)
                    sign = load_part_f32(argument(arguments, 2) + r * 4, count)
                    place = (token * width + r) * size
                    store_part(argument(arguments, 3) + place, cosine(angle) * scale, count)
                    store_part(argument(arguments, 4) + place, sine(angle) * sign * scale, count)
            finish(thread)
            item = claim(thread)

    return tables


def make_rotate_heads(dtype: str, interleaved: bool) -> Any:
    """Rotate the first R elements of every head in place. An item is some heads of one token.

    Arguments: 0 x, 1 cos, 2 signed_sin, 3 H, 4 R, 5 heads of an item, 6 x's token stride in bytes, 7 its head stride,
    8 the tables' token stride, 9 their head stride.
    """
    rotate = make_rotate(dtype, dtype, interleaved=interleaved)

    def rotate_heads(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            heads, rotated, per_item = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
            parts = (heads + per_item - 1) // per_item
            token, first = item // parts, item % parts * per_item
            row = argument(arguments, 0) + token * argument(arguments, 6)
            for head in range(first, min(first + per_item, heads)):
                table = token * argument(arguments, 8) + head * argument(arguments, 9)
                cos, signed_sin = argument(arguments, 1) + table, argument(arguments, 2) + table
                rotate(row + head * argument(arguments, 7), cos, signed_sin, rotated)
            finish(thread)
            item = claim(thread)

    return rotate_heads
