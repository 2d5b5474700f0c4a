"""Products of rows of activations with rows of a float32 matrix as it lies, for small matrices such as routers.

A product is one chain of multiply-adds in 16 lanes along the row, whatever the tile, so it does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.typing.templates import signature
from numba.extending import intrinsic

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
    store,
)


def make_row_products(dtype: str, size: int) -> Any:
    """Make the intrinsic that computes the products of `size` rows of x (in `dtype`) and as many rows of a float32 weight.

    All arguments are int64, addresses and strides in bytes: x, its row stride, index of its last row, weight, its row stride, index
    of its last row, width, out, out's row stride. Behind a last row, that row is computed again.
    """
    x_bytes = 4 if dtype == "f32" else 2

    @intrinsic
    def row_products(typingctx, x, x_stride, last_row, weight, weight_stride, last_column, width, out, out_stride):  # type: ignore[no-untyped-def]
        def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
            x, x_stride, last_row, weight, weight_stride, last_column, width, out, out_stride = args

            def places(base, stride, last):  # type: ignore[no-untyped-def]
                each = [b.select(b.icmp_signed("<", int64(i), last), int64(i), last) for i in range(size)]
                return [b.add(base, b.mul(index, stride)) for index in each]

            rows, columns = places(x, x_stride, last_row), places(weight, weight_stride, last_column)

            def products(totals, left, right):  # type: ignore[no-untyped-def]
                return [multiply_add(b, left[i // size], right[i % size], total) for i, total in enumerate(totals)]

            def body(k, totals):  # type: ignore[no-untyped-def]
                left = [emit_load(b, b.add(row, b.mul(k, int64(x_bytes))), dtype) for row in rows]
                right = [emit_load(b, b.add(column, b.mul(k, int64(4))), "f32") for column in columns]
                return products(totals, left, right)

            full, rest = b.and_(width, int64(-LANES)), b.and_(width, int64(LANES - 1))

            def tail(_, totals):  # type: ignore[no-untyped-def]
                left = [emit_load_part(b, b.add(row, b.mul(full, int64(x_bytes))), rest, dtype) for row in rows]
                right = [emit_load_part(b, b.add(column, b.mul(full, int64(4))), rest, "f32") for column in columns]
                return products(totals, left, right)

            totals = [constant(F32_16, 0.0)] * size**2
            totals = Loop(b, full, LANES, totals, body, may_be_empty=True).results
            totals = Loop(b, rest, LANES, totals, tail, may_be_empty=True).results
            outs = places(out, out_stride, last_row)
            for row, place in enumerate(outs):
                for column, shift in enumerate(places(int64(0), int64(4), last_column)):
                    store(b, horizontal_sum(b, totals[row * size + column]), b.add(place, shift), 4)
            return context.get_dummy_value()

        return signature(types.void, *[types.int64] * 9), generate

    return row_products
