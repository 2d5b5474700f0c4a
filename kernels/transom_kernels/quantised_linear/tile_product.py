"""Multiplies a block of rounded rows (`rounded_rows`) by a panel of a quantised weight (`weights`), inside a kernel.

The integer products of each group are summed exactly. Then sum * (scale of the weight * scale of the row) is added to the float32
totals, group after group, in the same order for any number of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import INT, NOTHING, emits, helper
from transom_kernels.cpu.vector_code import (
    F32_16,
    I16,
    I32_16,
    Loop,
    broadcast,
    constant,
    dot_wide,
    emit_prefetch,
    half_to_float,
    int64,
    load,
    multiply_add,
    store,
    wide_total,
)
from transom_kernels.quantised_linear.layout import LINE, QUADS, RECORD, group_bytes, has_minimum, is_small
from transom_kernels.quantised_linear.rounded_rows import BLOCK_ROWS, SCALE, SCALED_SUM, START

_AHEAD = 2048  # bytes from the levels in use to those that are prefetched
_FEW_ROWS = 4  # blocks of up to this many rows prefetch weights from memory; larger ones find them in a cache


def make_tile_product(format: str) -> Any:
    """Build tile_product(rows, levels, scales, records, groups, sums) for blocks of any number of rows in BLOCK_ROWS.

    It stores 16 float32 per row at `sums`, rows 64 bytes apart.
    """
    products = {rows: _make_product(format, rows) for rows in BLOCK_ROWS}
    of_1, of_2 = products[1], products[2]
    of_4, of_8 = products.get(4, of_1), products.get(8, of_1)

    @helper
    def tile_product(rows, levels, scales, records, num_groups, sums):
        if rows == 1:
            of_1(levels, scales, records, num_groups, sums)
        elif rows == 2:
            of_2(levels, scales, records, num_groups, sums)
        elif rows == 4:
            of_4(levels, scales, records, num_groups, sums)
        else:
            of_8(levels, scales, records, num_groups, sums)

    return tile_product


def _make_product(format: str, rows: int) -> Any:
    """Build the function for blocks of `rows` rows."""
    return emits(NOTHING, *[INT] * 5)(partial(_emit_product, format=format, rows=rows))


def _emit_product(
    b: ir.IRBuilder,
    levels: ir.Value,
    scales: ir.Value,
    records: ir.Value,
    num_groups: ir.Value,
    sums: ir.Value,
    *,
    format: str,
    rows: int,
) -> None:
    small, minimal = is_small(format), has_minimum(format)
    level_bytes, scale_bytes = group_bytes(format)
    lines = level_bytes // LINE

    def of_record(record: ir.Value, row: int, offset: int, vector: ir.VectorType) -> ir.Value:
        number = load(b, b.add(record, int64(row * RECORD + offset)), vector.element, 4)
        return broadcast(b, number, vector)

    def factors(address: ir.Value) -> ir.Value:
        return half_to_float(b, load(b, address, ir.VectorType(I16, 16), 32))

    def quads_of(line: ir.Value) -> list[ir.Value]:
        if not small:
            return [line]
        low, four = constant(I32_16, 0x0F0F0F0F), constant(I32_16, 4)
        return [b.and_(line, low), b.and_(b.lshr(line, four), low)]

    def group(g: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        record = b.add(records, b.mul(g, int64(rows * RECORD)))
        begin = b.add(levels, b.mul(g, int64(level_bytes)))
        zero = constant(I32_16, 0)
        pairs = [(zero, zero)] * rows
        for index in range(lines):
            if rows <= _FEW_ROWS:  # weights come from memory
                emit_prefetch(b, b.add(begin, int64(index * LINE + _AHEAD)))
            line = load(b, b.add(begin, int64(index * LINE)), I32_16, LINE)
            for quad, unsigned in enumerate(quads_of(line), index * (QUADS // lines)):
                for row in range(rows):
                    pairs[row] = dot_wide(b, pairs[row], unsigned, b.add(record, int64(row * RECORD)), quad)
        address = b.add(scales, b.mul(g, int64(scale_bytes)))
        scale = factors(address)
        for row in range(rows):
            product = wide_total(b, pairs[row])
            if not minimal:
                product = b.add(product, of_record(record, row, START, I32_16))
            both = b.fmul(scale, of_record(record, row, SCALE, F32_16))
            totals[row] = multiply_add(b, b.sitofp(product, F32_16), both, totals[row])
        if minimal:
            minimum = factors(b.add(address, int64(LINE // 2)))
            for row in range(rows):
                scaled_sum = of_record(record, row, SCALED_SUM, F32_16)
                totals[row] = multiply_add(b, minimum, scaled_sum, totals[row])
        return totals

    loop = Loop(b, num_groups, 1, [constant(F32_16, 0.0)] * rows, group)
    for row, total in enumerate(loop.results):
        store(b, total, b.add(sums, int64(row * LINE)), LINE)
