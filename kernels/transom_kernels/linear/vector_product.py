"""The inner product of linear layers in vector registers: a few rows of x times one or two panels of a weight.

A *step* is one 64-byte line of a panel: one float32, or one pair of 16-bit numbers, for each of 16 outputs. Every output is one
chain of additions in the order of the steps, for any number of rows, so that a row's result does not depend on other rows.
"""

from functools import partial
from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.vector_code import (
    F16,
    F32,
    F32_16,
    I32,
    I32_16,
    Loop,
    broadcast,
    constant,
    dot_pairs,
    emit_prefetch,
    int64,
    load,
    multiply_add,
    pair_high,
    pair_low,
    repeated_rows,
    shuffle,
    store,
)
from transom_kernels.linear.layout import LINE, NUMBERS_PER_WORD

_AHEAD = 4096
_UNROLL = 4


def make_vector_product(num_rows: int, num_panels: int, dtype: str, *, pairs: bool) -> Any:
    """Build the function that multiplies up to `num_rows` rows by one or two panels of a weight in `dtype`.

    With `pairs` x is bfloat16 and multiplied pair by pair; otherwise x is float32. All arguments are int64; addresses and
    strides are in bytes:

        rows, row_stride, count   x: address of its first row, stride, and how many rows there are (`num_rows` or fewer)
        weights                   addresses of the panels (a tuple)
        num_steps                 a multiple of 4
        sums, sum_stride          address of the first row of sums, and stride; the sums of a second panel lie 64 bytes further
        adds                      1: products are added to the sums in memory; 0: the sums are overwritten
    """

    add_products = _dot if pairs else partial(_multiply, dtype=dtype)

    @emits(NOTHING, INT, INT, INT, (INT,) * num_panels, INT, INT, INT, INT)
    def vector_product(b, rows, row_stride, count, weights, num_steps, sums, sum_stride, adds):
        addresses = repeated_rows(b, rows, row_stride, b.sub(count, int64(1)), num_rows)
        panels = [b.extract_value(weights, p) for p in range(num_panels)]
        places = [
            b.add(b.add(sums, b.mul(sum_stride, int64(m))), int64(LINE * p))
            for m in range(num_rows)
            for p in range(num_panels)
        ]
        zero, before = constant(F32_16, 0.0), b.icmp_signed("!=", adds, int64(0))
        with b.if_then(b.not_(before)):
            for place in places:
                store(b, zero, place, 4)
        totals = [load(b, place, F32_16, 4) for place in places]

        def steps(k: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            for offset in range(_UNROLL):
                index = b.add(k, int64(offset))
                lines = [_line(b, b.add(panel, b.mul(index, int64(LINE)))) for panel in panels]
                totals = add_products(b, totals, lines, addresses, index)
            return totals

        for place, total in zip(places, Loop(b, num_steps, _UNROLL, totals, steps).results, strict=True):
            store(b, total, place, 4)

    return vector_product


def _line(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Load one step of a panel, and prefetch what is read from memory soon."""
    emit_prefetch(b, b.add(address, int64(_AHEAD)), level=2)
    return load(b, address, I32_16, LINE)


def _dot(
    b: ir.IRBuilder, totals: list[ir.Value], lines: list[ir.Value], addresses: list[ir.Value], index: ir.Value
) -> list[ir.Value]:
    """Add the products of one pair of each row."""
    results = []
    for m, address in enumerate(addresses):
        x = broadcast(b, load(b, b.add(address, b.mul(index, int64(4))), I32, 2), I32_16)
        for p, line in enumerate(lines):
            results.append(dot_pairs(b, totals[m * len(lines) + p], line, x))
    return results


def _multiply(
    b: ir.IRBuilder,
    totals: list[ir.Value],
    lines: list[ir.Value],
    addresses: list[ir.Value],
    index: ir.Value,
    dtype: str,
) -> list[ir.Value]:
    """Add the products of one number of each row, or of two numbers if the weight has 16 bits."""
    words = NUMBERS_PER_WORD[dtype]
    for word, numbers in enumerate(zip(*(_widen(b, line, dtype) for line in lines), strict=True)):
        place = b.add(b.mul(index, int64(4 * words)), int64(4 * word))
        results = []
        for m, address in enumerate(addresses):
            x = broadcast(b, load(b, b.add(address, place), F32, 4), F32_16)
            for p, number in enumerate(numbers):
                results.append(multiply_add(b, number, x, totals[m * len(numbers) + p]))
        totals = results
    return totals


def _widen(b: ir.IRBuilder, line: ir.Value, dtype: str) -> tuple[ir.Value, ...]:
    """Return the numbers of a line in float32: one vector, or two, with the first and the second numbers of all pairs."""
    if dtype == "f32":
        return (b.bitcast(line, F32_16),)
    if dtype == "bf16":
        return (pair_low(b, line), pair_high(b, line))
    halves = b.bitcast(line, ir.VectorType(F16, 32))
    return tuple(
        b.fpext(shuffle(b, halves, halves, list(range(first, 32, 2))), ir.VectorType(F32, 16)) for first in (0, 1)
    )
