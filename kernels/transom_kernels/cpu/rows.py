"""Functions over one row of numbers that several kernels call: the scale of an RMS norm, and rotary position embedding (RoPE).

Each `make_*` returns a function for the dtypes given; rows are addresses, and may have any width.

Legend: N row width, R rotated width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    STORE,
    STORE_PART,
    add_pairs_1,
    add_pairs_2,
    add_pairs_4,
    add_pairs_8,
    fma,
    lane_sum,
    load_f32,
    splat,
    sqrt,
    store_f32,
    swap_neighbours,
)
from transom_kernels.cpu.work import helper


def make_inverse_rms(dtype: str) -> Any:
    """inverse_rms(x, N, eps) = 1 / sqrt(mean(x ** 2) + eps) of a row."""
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]

    @helper
    def inverse_rms(x, width, eps):  # type: ignore[no-untyped-def]
        full, rest = width // 16 * 16, width % 16
        total = splat(0.0)
        for k in range(0, full, 16):
            lanes = load(x + k * size)
            total = fma(lanes, lanes, total)
        if rest:
            lanes = load_part(x + full * size, rest)
            total = fma(lanes, lanes, total)
        return 1.0 / sqrt(lane_sum(total) / width + eps)

    return inverse_rms


def make_hadamard() -> Any:
    """hadamard(x, N, block): multiply a row of float32 by the Hadamard matrix made of blocks, a power of two that divides N.

    The row has whole vectors of memory, in which zeros follow it. The product is sums and differences of pairs 1, 2, 4, ... apart.
    """

    @helper
    def hadamard(x, width, block):  # type: ignore[no-untyped-def]
        factor = splat(1.0 / sqrt(1.0 * block))
        for k in range(0, width, 16):
            lanes = load_f32(x + k * 4) * factor
            if block > 1:
                lanes = add_pairs_1(lanes)
            if block > 2:
                lanes = add_pairs_2(lanes)
            if block > 4:
                lanes = add_pairs_4(lanes)
            if block > 8:
                lanes = add_pairs_8(lanes)
            store_f32(x + k * 4, lanes)
        distance = 16
        while distance < block:
            for begin in range(0, width, 2 * distance):
                for k in range(begin, begin + distance, 16):
                    first, second = load_f32(x + k * 4), load_f32(x + (k + distance) * 4)
                    store_f32(x + k * 4, first + second)
                    store_f32(x + (k + distance) * 4, first - second)
            distance *= 2

    return hadamard


def make_rotate(dtype: str, table_dtype: str, *, interleaved: bool) -> Any:
    """rotate(x, cos, signed_sin, R): rotate the pairs of R elements in place, with one row of each table.

    For each pair (i, j): x[i], x[j] = x[i] cos[i] + x[j] signed_sin[i],  x[j] cos[j] + x[i] signed_sin[j]. Pairs are
    (i, i + R / 2), or (2i, 2i + 1) if `interleaved`.
    """
    load, load_part, store, store_part = LOAD[dtype], LOAD_PART[dtype], STORE[dtype], STORE_PART[dtype]
    load_table, load_table_part = LOAD[table_dtype], LOAD_PART[table_dtype]
    size, table_size = NUM_BYTES[dtype], NUM_BYTES[table_dtype]

    @helper
    def rotate_halves(x, cos, signed_sin, rotated):  # type: ignore[no-untyped-def]
        half = rotated // 2
        full, rest = half // 16 * 16, half % 16
        for k in range(0, full, 16):
            i, j = x + k * size, x + (half + k) * size
            first, second = load(i), load(j)
            t, u = k * table_size, (half + k) * table_size
            store(i, fma(first, load_table(cos + t), second * load_table(signed_sin + t)))
            store(j, fma(second, load_table(cos + u), first * load_table(signed_sin + u)))
        if rest:
            i, j = x + full * size, x + (half + full) * size
            first, second = load_part(i, rest), load_part(j, rest)
            t, u = full * table_size, (half + full) * table_size
            other = second * load_table_part(signed_sin + t, rest)
            store_part(i, fma(first, load_table_part(cos + t, rest), other), rest)
            other = first * load_table_part(signed_sin + u, rest)
            store_part(j, fma(second, load_table_part(cos + u, rest), other), rest)

    @helper
    def rotate_neighbours(x, cos, signed_sin, rotated):  # type: ignore[no-untyped-def]
        full, rest = rotated // 16 * 16, rotated % 16
        for k in range(0, full, 16):
            lanes = load(x + k * size)
            other = swap_neighbours(lanes) * load_table(signed_sin + k * table_size)
            store(x + k * size, fma(lanes, load_table(cos + k * table_size), other))
        if rest:
            lanes = load_part(x + full * size, rest)
            other = swap_neighbours(lanes) * load_table_part(signed_sin + full * table_size, rest)
            store_part(x + full * size, fma(lanes, load_table_part(cos + full * table_size, rest), other), rest)

    return rotate_neighbours if interleaved else rotate_halves
