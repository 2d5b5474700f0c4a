"""Rounds rows of x to 16 bits inside a kernel, for products with quantised weights.

Each group of 32 columns of a row becomes a *record* of 80 bytes:

    bytes 0 to 63    the integers, -32512 to 32512, as this processor multiplies them (`vector_code.store_wide`)
    bytes 64 to 67   -zero * sum of the integers, in int32: added to the product with levels, since a level is element + zero
    bytes 68 to 71   the group's scale, in float32
    bytes 72 to 75   scale * sum, in float32: multiplied by the minimum of a weight's group

Rows belong to *blocks* of 8, 4, 2 or 1 rows: 13 rows are blocks of 8, 4 and 1. (Without AVX-512 blocks have 2 rows or 1.) A block's
records are stored together: those of all its rows for group 0, then those for group 1, and so on.

Legend: K columns of a row.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.language import FLOATS, INT, NOTHING, emits, helper
from transom_kernels.cpu.simd import LOAD, LOAD_PART, NUM_BYTES
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I32,
    I32_16,
    WIDE_LARGEST,
    broadcast,
    constant,
    float32_constant,
    function,
    int64,
    lanewise,
    store,
    store_wide,
)
from transom_kernels.quantised_linear.layout import GROUP, RECORD, SMALLEST

START, SCALE, SCALED_SUM = 64, 68, 72  # byte offsets in a record
BLOCK_ROWS = (8, 4, 2, 1) if cpu_target().avx512 else (2, 1)  # the largest block is what the registers can hold


@helper
def block_rows(left):
    """Return the rows of the next block if `left` rows are left."""
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
