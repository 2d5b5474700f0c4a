"""The inner product of small matrices, such as routers: multiplies rows of x by rows of a float32 weight that is not packed.

A product is one chain of multiply-adds in 16 lanes along the row, the same in every tile, so it does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import INT, NOTHING, emits
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


def make_row_products(dtype: str, size: int) -> Any:
    """Build the function that multiplies a tile: up to `size` rows of x, in `dtype`, by up to `size` rows of the weight.

    out[m, n] = sum over k of x[m, k] * weight[n, k], in float32. Arguments (strides are in bytes):

        x, x_stride, last_x                  address of the tile's first row of x, stride, and index of its last row, from 0
        weight, weight_stride, last_weight   the same of the weight
        width                                K, the length of all rows
        out, out_stride                      address of out[0, 0], and stride
    """
    x_bytes = 4 if dtype == "f32" else 2

    @emits(NOTHING, *[INT] * 9)
    def row_products(b, x, x_stride, last_x, weight, weight_stride, last_weight, width, out, out_stride):
        # a tile with fewer rows computes its last row several times, and stores it to the same place
        x_rows, weight_rows = (
            repeated_rows(b, x, x_stride, last_x, size),
            repeated_rows(b, weight, weight_stride, last_weight, size),
        )
        full, rest = b.and_(width, int64(-LANES)), b.and_(width, int64(LANES - 1))

        def add_products(totals: list[ir.Value], of_x: list[ir.Value], of_weight: list[ir.Value]) -> list[ir.Value]:
            pairs = [(left, right) for left in of_x for right in of_weight]
            return [multiply_add(b, left, right, total) for (left, right), total in zip(pairs, totals, strict=True)]

        def whole_vectors(k: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            of_x = [emit_load(b, b.add(row, b.mul(k, int64(x_bytes))), dtype) for row in x_rows]
            return add_products(
                totals, of_x, [emit_load(b, b.add(row, b.mul(k, int64(4))), "f32") for row in weight_rows]
            )

        def last_part(_: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            of_x = [emit_load_part(b, b.add(row, b.mul(full, int64(x_bytes))), rest, dtype) for row in x_rows]
            of_weight = [emit_load_part(b, b.add(row, b.mul(full, int64(4))), rest, "f32") for row in weight_rows]
            return add_products(totals, of_x, of_weight)

        totals = [constant(F32_16, 0.0)] * size**2
        totals = Loop(b, full, LANES, totals, whole_vectors, may_be_empty=True).results
        totals = Loop(b, rest, LANES, totals, last_part, may_be_empty=True).results  # once, or not at all
        out_rows = repeated_rows(b, out, out_stride, last_x, size)
        places = [place for row in out_rows for place in repeated_rows(b, row, int64(4), last_weight, size)]
        for place, total in zip(places, totals, strict=True):
            store(b, horizontal_sum(b, total), place, 4)

    return row_products
