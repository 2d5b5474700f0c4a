"""Functions that several kernels call: RMS norm, rotary position embedding (RoPE), Hadamard products, gated activations, soft
caps, the k-th largest number, and the product of small matrices.

Each `make_*` builds a function for the given dtypes. Rows are given by address and may have any width; gates and ups are vectors.

Legend: N row width, R rotated width.
"""

import math
from itertools import product
from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import INT, NOTHING, emits, helper, inlined
from transom_kernels.cpu.simd import (
    ADD_PAIRS,
    LOAD_LANES,
    NUM_BYTES,
    count_bits,
    float32,
    float_of_sort_key,
    fma,
    keep_nan,
    lane_sum,
    lanes_at_least,
    load_f32,
    row_access,
    sigmoid,
    sort_key,
    splat,
    sqrt,
    store_f32,
    swap_neighbours,
    tanh,
    vector_max,
    vector_max_or_nan,
    vector_min,
)
from transom_kernels.cpu.vector_code import (
    F32_16,
    LANES,
    Loop,
    constant,
    emit_load,
    emit_load_part,
    horizontal_sum,
    int64,
    multiply_add,
    repeated_rows,
    store,
)

_LOWEST = -math.inf
_GELU_SLOPE = 2 * 0.7978845608028654  # 2 sqrt(2 / pi)
_GELU_CUBE = 0.044715 * _GELU_SLOPE


def make_inverse_rms(dtype: str) -> Any:
    """Build inverse_rms(x, N, eps) = 1 / sqrt(mean(x ** 2) + eps) of a row."""
    load, size = LOAD_LANES[dtype], NUM_BYTES[dtype]

    @helper
    def inverse_rms(x, width, eps):
        total = splat(0.0)
        for k in range(0, width, 16):
            lanes = load(x + k * size, width - k)
            total = fma(lanes, lanes, total)
        return 1.0 / sqrt(lane_sum(total) / width + eps)

    return inverse_rms


def make_hadamard() -> Any:
    """Build hadamard(x, N, block), which multiplies a row of float32 by the Hadamard matrix (`kv_write.reference`) in place.

    The matrix is block-diagonal, with blocks of width `block`, a power of two that divides N, scaled by 1 / sqrt(block). The row's
    memory is padded with zeros to whole vectors. The fast Walsh-Hadamard transform computes the product as sums and differences of
    elements that are 1, 2, 4, ... apart.
    """
    add_pairs_1, add_pairs_2, add_pairs_4, add_pairs_8 = (ADD_PAIRS[distance] for distance in (1, 2, 4, 8))

    @helper
    def hadamard(x, width, block):
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
    """Build rotate(x, cos, signed_sin, R), which rotates pairs among the R elements from `x` on in place, with a row of each table.

    For each pair (i, j): x[i], x[j] = x[i] cos[i] + x[j] signed_sin[i],  x[j] cos[j] + x[i] signed_sin[j]. Pairs are
    (i, i + R / 2), or (2i, 2i + 1) if `interleaved`.
    """
    (load, store, size), (load_table, _, table_size) = row_access(dtype), row_access(table_dtype)

    @helper
    def rotate_halves(x, cos, signed_sin, rotated):
        half = rotated // 2
        for k in range(0, half, 16):
            i, j, count = x + k * size, x + (half + k) * size, half - k
            first, second = load(i, count), load(j, count)
            t, u = k * table_size, (half + k) * table_size
            other = second * load_table(signed_sin + t, count)
            store(i, fma(first, load_table(cos + t, count), other), count)
            other = first * load_table(signed_sin + u, count)
            store(j, fma(second, load_table(cos + u, count), other), count)

    @helper
    def rotate_neighbours(x, cos, signed_sin, rotated):
        for k in range(0, rotated, 16):
            lanes, count = load(x + k * size, rotated - k), rotated - k
            other = swap_neighbours(lanes) * load_table(signed_sin + k * table_size, count)
            store(x + k * size, fma(lanes, load_table(cos + k * table_size, count), other), count)

    return rotate_neighbours if interleaved else rotate_halves


def make_gated(activation: str) -> Any:
    """Build gated(gate, up) = activation(gate) * up, where the activation is `silu` or `gelu_tanh`: gate * sigmoid(slope); or
    relu(up) ** 2 if it is `relu2`."""
    is_gelu = activation == "gelu_tanh"

    @inlined
    def gated(gate, up):
        slope = gate
        if is_gelu:
            # gelu(x) = x (1 + tanh(y)) / 2 with y = sqrt(2 / pi) (x + 0.044715 x ** 3), and (1 + tanh(y)) / 2 = sigmoid(2 y)
            slope = gate * fma(gate * gate, splat(_GELU_CUBE), splat(_GELU_SLOPE))
        return gate * sigmoid(slope) * up

    @inlined
    def squared(gate, up):
        positive = vector_max_or_nan(up, splat(0.0))
        return positive * positive

    return squared if activation == "relu2" else gated


@inlined
def limited_gate(gate, limit):
    """Return gates clamped to at most `limit`; NaN stays NaN."""
    return keep_nan(vector_min(gate, splat(limit)), gate)


@inlined
def limited_up(up, limit):
    """Return ups clamped to [-limit, limit]; NaN stays NaN."""
    return keep_nan(vector_max(vector_min(up, splat(limit)), splat(-limit)), up)


@inlined
def soft_capped(y, cap):
    """Return cap * tanh(y / cap); NaN stays NaN."""
    return keep_nan(tanh(y / splat(cap)) * splat(cap), y)


@helper
def kth_largest(values, count, k, low, high):
    """Return the k-th largest of `count` values; -inf if fewer than k are `low` or more. No value is above `high`.

    A binary search: the range of sort keys (integers in the order of the floats) is halved until one is left.
    """
    first, last = sort_key(low), sort_key(high)
    if count_from(values, count, low) < k:
        return _LOWEST
    while first < last:
        middle = first + (last - first + 1) // 2
        if count_from(values, count, float_of_sort_key(middle)) >= k:
            first = middle
        else:
            last = middle - 1
    return float_of_sort_key(first)


@helper
def count_from(values, count, bound):
    """Return how many of `count` values are `bound` or more; -inf must pad the values to a multiple of 16."""
    found, bounds = 0, splat(bound)
    for at in range(0, 4 * count, 64):
        found += count_bits(lanes_at_least(load_f32(values + at), bounds))
    return found


@helper
def next_float(x):
    """Return the next larger float32. -0 counts as 0: the sort key after that of -0 is that of 0, which is not larger."""
    return float_of_sort_key(sort_key(x if x != 0.0 else float32(0.0)) + 1)


def emit_dots(
    b: ir.IRBuilder, x: list[ir.Value], weights: list[ir.Value], width: ir.Value, x_dtype: str, dtype: str
) -> list[ir.Value]:
    """Return sum_k x[m, k] * weights[n, k] in float32, for each row m of x and each row n of the weights: (0, 0), (0, 1), ...

    Rows are given by their addresses; they have `width` numbers of `x_dtype` and of `dtype`. The order of a sum depends on the
    width alone.
    """
    full, rest = b.and_(width, int64(-LANES)), b.and_(width, int64(LANES - 1))

    def add_products(k: ir.Value, totals: list[ir.Value], count: ir.Value | None = None) -> list[ir.Value]:
        def numbers(row: ir.Value, kind: str) -> ir.Value:
            place = b.add(row, b.mul(k, int64(NUM_BYTES[kind])))
            return emit_load(b, place, kind) if count is None else emit_load_part(b, place, count, kind)

        of_x, of_weights = [numbers(row, x_dtype) for row in x], [numbers(row, dtype) for row in weights]
        pairs = product(of_x, of_weights)
        return [multiply_add(b, left, right, total) for (left, right), total in zip(pairs, totals, strict=True)]

    totals = [constant(F32_16, 0.0)] * (len(x) * len(weights))
    totals = Loop(b, full, LANES, totals, add_products, may_be_empty=True).results
    totals = Loop(
        b, rest, LANES, totals, lambda _, last: add_products(full, last, rest), may_be_empty=True
    ).results  # once, or not at all
    return [horizontal_sum(b, total) for total in totals]


def make_row_products(dtype: str, size: int) -> Any:
    """Build the function that multiplies a tile: up to `size` rows of x, in `dtype`, by up to `size` rows of the weight.

    out[m, n] = sum over k of x[m, k] * weight[n, k], in float32. Arguments (strides are in bytes):

        x, x_stride, last_x                  address of the tile's first row of x, stride, and index of its last row, from 0
        weight, weight_stride, last_weight   the same for the weight
        width                                K, the length of all rows
        out, out_stride                      address of out[0, 0], and stride
    """

    @emits(NOTHING, *[INT] * 9)
    def row_products(b, x, x_stride, last_x, weight, weight_stride, last_weight, width, out, out_stride):
        # a tile with fewer than `size` rows computes its last row several times, and stores it at the same address
        x_rows, weight_rows = (
            repeated_rows(b, x, x_stride, last_x, size),
            repeated_rows(b, weight, weight_stride, last_weight, size),
        )
        totals = emit_dots(b, x_rows, weight_rows, width, dtype, "f32")
        out_rows = repeated_rows(b, out, out_stride, last_x, size)
        places = [place for row in out_rows for place in repeated_rows(b, row, int64(4), last_weight, size)]
        for place, total in zip(places, totals, strict=True):
            store(b, total, place, 4)

    return row_products
