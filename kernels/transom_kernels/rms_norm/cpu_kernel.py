"""RMS normalisation for CPUs, in numba: of rows, also of sums with the residual, and of heads in place. `cpu.py` launches it.

rms_norm(x, weight) = x / sqrt(mean(x ** 2) + eps) * weight, computed in float32.

Legend: T rows or tokens, N row width, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.rows import make_inverse_rms
from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    ROUND,
    STORE,
    STORE_PART,
    float_of_bits,
    splat,
)
from transom_kernels.cpu.work import argument, claim, finish, helper


def make_rms_norm(dtype: str, weight_dtype: str) -> Any:
    """y = rms_norm(x, inner); sum = (residual + y) * factor; out = rms_norm(sum, weight). An item is some rows.

    Steps whose argument is 0 are left out: without `inner` y is x, without `residual` the sum is y. Values are rounded where
    separate operators would write a tensor. Arguments:
     0 x, 1 residual, 2 inner, 3 weight, 4 out, 5 sums (both contiguous), 6 T, 7 rows of an item, 8 N,
     9 x's row stride in bytes, 10 residual's, 11 factor, 12 eps.
    """
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    store, store_part, rounded = STORE[dtype], STORE_PART[dtype], ROUND[dtype]
    load_weight, load_weight_part, weight_size = LOAD[weight_dtype], LOAD_PART[weight_dtype], NUM_BYTES[weight_dtype]
    inverse_rms = make_inverse_rms(dtype)

    @helper
    def add(x, residual, inner, sums, width, factor, eps):  # type: ignore[no-untyped-def]
        """Store the sum of one row."""
        full, rest = width // 16 * 16, width % 16
        scale = splat(inverse_rms(x, width, eps)) if inner else splat(1.0)
        for k in range(0, full, 16):
            y = load(x + k * size)
            if inner:
                y = rounded(y * scale * load_weight(inner + k * weight_size))
            store(sums + k * size, rounded(load(residual + k * size) + y) * factor)
        if rest:
            y = load_part(x + full * size, rest)
            if inner:
                y = rounded(y * scale * load_weight_part(inner + full * weight_size, rest))
            total = rounded(load_part(residual + full * size, rest) + y) * factor
            store_part(sums + full * size, total, rest)

    @helper
    def normalise(x, weight, out, width, eps):  # type: ignore[no-untyped-def]
        """Store one normalised row."""
        full, rest = width // 16 * 16, width % 16
        scale = splat(inverse_rms(x, width, eps))
        for k in range(0, full, 16):
            store(out + k * size, load(x + k * size) * scale * load_weight(weight + k * weight_size))
        if rest:
            lanes = load_part(x + full * size, rest) * scale * load_weight_part(weight + full * weight_size, rest)
            store_part(out + full * size, lanes, rest)

    def rms_norm(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            residual, inner, weight = argument(arguments, 1), argument(arguments, 2), argument(arguments, 3)
            width, eps = argument(arguments, 8), float_of_bits(argument(arguments, 12))
            factor = splat(float_of_bits(argument(arguments, 11)))
            first = item * argument(arguments, 7)
            for row in range(first, min(first + argument(arguments, 7), argument(arguments, 6))):
                x = argument(arguments, 0) + row * argument(arguments, 9)
                if residual:
                    sums = argument(arguments, 5) + row * width * size
                    add(x, residual + row * argument(arguments, 10), inner, sums, width, factor, eps)
                    x = sums
                if weight:
                    normalise(x, weight, argument(arguments, 4) + row * width * size, width, eps)
            finish(thread)
            item = claim(thread)

    return rms_norm


def make_norm_heads(dtype: str, weight_dtype: str) -> Any:
    """x = rms_norm(x, weight) of every head, in place. An item is some heads of one token.

    Arguments: 0 x, 1 weight [H, D], contiguous, or 0, 2 H, 3 D, 4 heads of an item, 5 x's token stride in bytes,
    6 its head stride, 7 eps.
    """
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    store, store_part = STORE[dtype], STORE_PART[dtype]
    load_weight, load_weight_part, weight_size = LOAD[weight_dtype], LOAD_PART[weight_dtype], NUM_BYTES[weight_dtype]
    inverse_rms = make_inverse_rms(dtype)

    @helper
    def normalise(x, weight, width, eps):  # type: ignore[no-untyped-def]
        full, rest = width // 16 * 16, width % 16
        scale = splat(inverse_rms(x, width, eps))
        for k in range(0, full, 16):
            lanes = load(x + k * size) * scale
            store(x + k * size, lanes * load_weight(weight + k * weight_size) if weight else lanes)
        if rest:
            lanes = load_part(x + full * size, rest) * scale
            if weight:
                lanes = lanes * load_weight_part(weight + full * weight_size, rest)
            store_part(x + full * size, lanes, rest)

    def norm_heads(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            weight, num_heads, width = argument(arguments, 1), argument(arguments, 2), argument(arguments, 3)
            per_item, eps = argument(arguments, 4), float_of_bits(argument(arguments, 7))
            parts = (num_heads + per_item - 1) // per_item
            token, first = item // parts, item % parts * per_item
            row = argument(arguments, 0) + token * argument(arguments, 5)
            for head in range(first, min(first + per_item, num_heads)):
                own = weight + head * width * weight_size if weight else 0
                normalise(row + head * argument(arguments, 6), own, width, eps)
            finish(thread)
            item = claim(thread)

    return norm_heads
