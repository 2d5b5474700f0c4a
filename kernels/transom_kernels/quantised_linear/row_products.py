"""Rounds rows of x to 16 bits inside a kernel, and multiplies a block of them by a panel of a quantised weight (`weights.py`).

Each group of 32 columns of a row becomes a *record* of 80 bytes:

    bytes 0 to 63    the integers, -32512 to 32512, as this processor multiplies them (`vector_code.store_wide`)
    bytes 64 to 67   -zero * sum of the integers, in int32: added to the product with levels, since a level is integer + zero
    bytes 68 to 71   the group's scale, in float32
    bytes 72 to 75   scale * sum, in float32: multiplied by the minimum of a weight's group

Rows belong to *blocks* of 8, 4, 2 or 1 rows: 13 rows are blocks of 8, 4 and 1. (Without AVX-512 blocks have 2 rows or 1.) A block's
records are stored together: those of all its rows for group 0, then those for group 1, and so on.

The integer products of each group are summed exactly. Then sum * (scale of the weight * scale of the row) is added to the float32
totals, group after group, in the same order for any number of rows.

Legend: K columns of a row.
"""

from functools import partial
from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import FLOATS, INT, NOTHING, emits, helper
from transom_kernels.cpu.simd import LOAD, LOAD_PART, NUM_BYTES
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I16,
    I32,
    I32_16,
    WIDE_LARGEST,
    Loop,
    broadcast,
    constant,
    dot_wide,
    emit_prefetch,
    float32_constant,
    function,
    half_to_float,
    int64,
    lanewise,
    load,
    multiply_add,
    store,
    store_wide,
    wide_total,
)
from transom_kernels.quantised_linear.weights import (
    GROUP,
    LINE,
    QUADS,
    RECORD,
    SMALLEST,
    group_bytes,
    has_minimum,
    is_small,
)

START, SCALE, SCALED_SUM = 64, 68, 72  # byte offsets in a record
BLOCK_ROWS = (8, 4, 2, 1) if cpu_target().avx512 else (2, 1)  # the largest block is what the registers can hold


@helper
def block_rows(left):
    """Return the number of rows of the next block if `left` rows are left."""
    for rows in BLOCK_ROWS:
        if left >= rows:
            return rows
    return 1


def make_round_rows(dtype: str) -> Any:
    """Build round_rows(x, row stride, rows, K, zero, records), which writes the records of rows."""
    load_lanes, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]

    @helper
    def round_rows(x, stride, num_rows, width, zero, records):
        num_groups, rest = (width + GROUP - 1) // GROUP, width % GROUP
        row = 0
        while row < num_rows:
            count = block_rows(num_rows - row)
            for r in range(count):
                at = x + (row + r) * stride
                record = records + (row * num_groups + r) * RECORD
                for _ in range(width // GROUP):
                    _round_group(load_lanes(at), load_lanes(at + 16 * size), zero, record)
                    at += GROUP * size
                    record += count * RECORD
                if rest:
                    first, second = load_part(at, min(rest, 16)), load_part(at + 16 * size, max(rest - 16, 0))
                    _round_group(first, second, zero, record)
            row += count

    return round_rows


@emits(NOTHING, FLOATS, FLOATS, INT, INT)
def _round_group(b, first, second, zero, record):
    """Write the record of a group: its first and its second 16 columns."""
    # magnitudes are ordered as their bits are; NaN is the largest, so that it reaches the scale and every result
    bits = [b.and_(b.bitcast(part, I32_16), constant(I32_16, 0x7FFFFFFF)) for part in (first, second)]
    largest = b.call(function(b, "llvm.smax.v16i32", I32_16, [I32_16] * 2), bits)
    magnitude = b.bitcast(b.call(function(b, "llvm.vector.reduce.smax.v16i32", I32, [I32_16]), [largest]), F32)
    is_tiny = b.fcmp_ordered("<", magnitude, float32_constant(SMALLEST))
    inverse = b.select(is_tiny, float32_constant(0.0), b.fdiv(float32_constant(WIDE_LARGEST), magnitude))
    factor = broadcast(b, inverse, F32_16)
    integers = [b.fptosi(lanewise(b, "rint", b.fmul(part, factor)), I32_16) for part in (first, second)]
    store_wide(b, integers, record)
    total = b.call(function(b, "llvm.vector.reduce.add.v16i32", I32, [I32_16]), [b.add(*integers)])
    scale = b.fmul(magnitude, float32_constant(1 / WIDE_LARGEST))
    store(b, b.neg(b.mul(total, b.trunc(zero, I32))), b.add(record, int64(START)), 4)
    store(b, scale, b.add(record, int64(SCALE)), 4)
    store(b, b.fmul(scale, b.sitofp(total, F32)), b.add(record, int64(SCALED_SUM)), 4)


_AHEAD = 4096  # bytes from the levels in use to those that are prefetched


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
            emit_prefetch(b, b.add(begin, int64(index * LINE + _AHEAD)), level=2)
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
