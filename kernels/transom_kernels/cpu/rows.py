"""Functions over one row of numbers that several kernels call: the scale of an RMS norm, and rotary position embedding (RoPE).

Each `make_*` returns a function for the dtypes given; rows are addresses, and may have any width.

Legend: N row width, R rotated width.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    STORE,
    STORE_PART,
    fma,
    lane_sum,
    splat,
    sqrt,
    swap_neighbours,
)


def make_inverse_rms(dtype: str) -> Any:
    """inverse_rms(x, N, eps) = 1 / sqrt(mean(x ** 2) + eps) of a row."""
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]

    @njit(error_model="numpy")
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


def make_rotate(dtype: str, table_dtype: str, *, interleaved: bool) -> Any:
    """rotate(x, cos, signed_sin, R): rotate the pairs of R elements in place, with one row of each table.

    For each pair (i, j): x[i], x[j] = x[i] cos[i] + x[j] signed_sin[i],  x[j] cos[j] + x[i] signed_sin[j]. Pairs are
    (i, i + R / 2), or (2i, 2i + 1) if `interleaved`.
    """
    load, load_part, store, store_part = LOAD[dtype], LOAD_PART[dtype], STORE[dtype], STORE_PART[dtype]
    load_table, load_table_part = LOAD[table_dtype], LOAD_PART[table_dtype]
    size, table_size = NUM_BYTES[dtype], NUM_BYTES[table_dtype]

    @njit(error_model="numpy")
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

    @njit(error_model="numpy")
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
