"""The inner product of the experts' CPU kernels: rows of activations times one panel of weights.

A *panel* is 64 rows of an expert's matrix, in the order in which kernels read it: four parts of 16 rows, in MXFP4 group by group of
32 columns (`weights.py`).

A sum is one chain of additions in the order of the columns, for any number of rows and any split of the columns, so a row's result
does not depend on other rows. With AMX one step of the chain adds the products of 32 columns. In MXFP4 the sum of each group of 32
columns starts at zero; it is multiplied by the group's scale (a power of two) and added to the sum of the groups before.

- unit: the columns in one 32-bit word of a row: one in float32, two in bfloat16. In MXFP4 a unit is two columns.
"""

from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import INT, NOTHING, emits, helper
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.tiles import configure_tiles, make_tile_product, release_tiles
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I8,
    I32,
    I32_16,
    LANES,
    Loop,
    broadcast,
    constant,
    dot_pairs,
    emit_prefetch,
    fp4_pairs,
    int64,
    load,
    multiply_add,
    pair_high,
    pair_low,
    repeated_rows,
    store,
)

PANEL_BYTES = 4 * 64  # of one row's 64 sums
GROUP_UNITS = 16  # units of a group of MXFP4
GROUP_BYTES = 17 * 64  # of a group of a panel: 16 lines of 64 bytes with elements, and one with scales

# With many rows, all of them are multiplied by a block of this many units before the next block, so that weights come from memory
# once, and then from the second-level cache (AMX: from the first-level cache).
_BLOCK_UNITS, _TILE_BLOCK_UNITS = 1024, 256
_AHEAD = 1024  # bytes from the weights in use to those that are prefetched

_TILE_ROWS = 16
_BYTES_16 = ir.VectorType(I8, LANES)


def make_multiply(kind: str, dtype: str) -> Any:
    """Build multiply(x, x_stride, rows, weight, units, sums, memory): it stores sums [rows, 64] float32 of rows times a panel.

    `kind` is the panel's format (f32, bf16, mx), or `tiles` for bfloat16 with AMX; `dtype` is that of x. Strides are in bytes; the
    padded columns of x are zeros. The rows of x and of the sums are followed by memory for 15 more rows, which AMX reads and
    writes; AMX also needs 64 bytes of `memory` for its configuration.
    """
    return _make_by_tiles() if kind == "tiles" else _make_by_vectors(kind, dtype)


def _make_by_tiles() -> Any:
    one, two = make_tile_product(1), make_tile_product(2)

    @helper
    def multiply(x, x_stride, rows, weight, units, sums, memory):
        part, tile = units * 64, min(rows, _TILE_ROWS)  # bytes of a part of the panel; a product takes two parts
        configure_tiles(memory, tile)
        block = units if rows <= 2 * _TILE_ROWS else _TILE_BLOCK_UNITS
        for begin in range(0, units, block):
            steps, adds = min(block, units - begin) // GROUP_UNITS, 1 if begin else 0
            for pair in range(2):
                weights = (weight + 2 * pair * part + begin * 64, weight + (2 * pair + 1) * part + begin * 64)
                for row in range(0, rows, 2 * _TILE_ROWS):
                    first, out = x + row * x_stride + begin * 4, sums + row * PANEL_BYTES + pair * 128
                    if row + _TILE_ROWS < rows:
                        firsts = (first, first + _TILE_ROWS * x_stride)
                        outs = (out, out + _TILE_ROWS * PANEL_BYTES)
                        two(firsts, x_stride, weights, steps, outs, PANEL_BYTES, adds, tile)
                    else:
                        one((first,), x_stride, weights, steps, (out,), PANEL_BYTES, adds, tile)
        release_tiles()

    return multiply


def _make_by_vectors(kind: str, dtype: str) -> Any:
    many_rows, tile_panels = (5, 4) if cpu_target().avx512 else (2, 2)
    one, two, many = (_make_tile(kind, dtype, rows, tile_panels) for rows in (1, 2, many_rows))
    groups = kind == "mx"
    x_unit_bytes = 8 if groups and dtype == "f32" else 4

    @helper
    def multiply(x, x_stride, rows, weight, units, sums, memory):
        panel_stride = (
            64 if groups else units * 64
        )  # from one part of the panel to the next; `panel` is the number of a part
        block = units if rows <= many_rows else _BLOCK_UNITS
        for begin in range(0, units, block):
            count = min(block, units - begin)
            part = weight + (begin // GROUP_UNITS * GROUP_BYTES if groups else begin * 64)
            first = x + begin * x_unit_bytes
            row = 0
            while row < rows:
                taken = min(many_rows, rows - row)
                for panel in range(0, 4, tile_panels):
                    at = part + panel * panel_stride
                    out = sums + row * PANEL_BYTES + panel * 64
                    place = first + row * x_stride
                    if taken == 1:
                        one(place, x_stride, 0, at, panel_stride, panel, count, out, begin)
                    elif taken == 2:
                        two(place, x_stride, 1, at, panel_stride, panel, count, out, begin)
                    else:
                        many(place, x_stride, taken - 1, at, panel_stride, panel, count, out, begin)
                row += taken

    return multiply


def _make_tile(kind: str, dtype: str, rows: int, panels: int) -> Any:
    """Build the function that computes the sums of `rows` rows and 16 * `panels` outputs, `panels` parts of one panel.

    If there are fewer rows, `last_row` is the number of the last one, which stands for those that are missing. If `goes_on` is not
    0, products are added to the sums in memory.
    """

    @emits(NOTHING, *[INT] * 9)
    def tile(b, x, x_stride, last_row, weight, panel_stride, panel, units, sums, goes_on):
        x_rows = repeated_rows(b, x, x_stride, last_row, rows)
        places = [
            b.add(row, int64(64 * p))
            for row in repeated_rows(b, sums, int64(PANEL_BYTES), last_row, rows)
            for p in range(panels)
        ]
        adds = b.icmp_signed("!=", goes_on, int64(0))
        zero = constant(F32_16, 0.0)
        totals = [b.select(adds, load(b, place, F32_16, 4), zero) for place in places]
        weights = [b.add(weight, b.mul(panel_stride, int64(p))) for p in range(panels)]
        if kind == "mx":  # a group's words are followed by 16 bytes of scales for each of four parts of 16 rows
            parts = [b.add(panel, int64(p)) for p in range(panels)]
            scales = [b.sub(int64(GROUP_UNITS * 64), b.mul(part, int64(48))) for part in parts]
            totals = _emit_groups(b, dtype, x_rows, weights, scales, units, totals)
        else:
            totals = _emit_units(b, dtype, x_rows, weights, units, totals)
        for place, total in zip(places, totals, strict=True):
            store(b, total, place, 4)

    return tile


def _emit_units(b, dtype, x_rows, weights, units, totals):
    """Emit the sums over plain weights."""

    def body(unit, totals):
        totals, kind = list(totals), F32_16 if dtype == "f32" else I32_16
        places = [b.add(weight, b.mul(unit, int64(64))) for weight in weights]
        values = [load(b, place, kind, 64) for place in places]
        if len(x_rows) == 1:  # with one row the weights come from memory, else from a cache
            for place in places:
                emit_prefetch(b, b.add(place, int64(_AHEAD)))
        for row, x in enumerate(x_rows):
            word = load(b, b.add(x, b.mul(unit, int64(4))), kind.element, 4)
            factor = broadcast(b, word, kind)
            for p, value in enumerate(values):
                index = row * len(weights) + p
                if dtype == "f32":
                    totals[index] = multiply_add(b, value, factor, totals[index])
                else:
                    totals[index] = dot_pairs(b, totals[index], value, factor)
        return totals

    return Loop(b, units, 1, totals, body).results


def _emit_groups(b, dtype, x_rows, weights, scales, units, totals):
    """Emit the sums over MXFP4 weights; `scales` are the distances in bytes from a group's words to its scales."""
    zeros = [constant(F32_16, 0.0)] * len(totals)
    x_bytes = 8 if dtype == "f32" else 4

    def group(unit, totals):
        offset = b.mul(b.sdiv(unit, int64(GROUP_UNITS)), int64(GROUP_BYTES))
        starts = [b.add(weight, offset) for weight in weights]

        def line(inner, sums):
            sums, at = list(sums), b.mul(inner, int64(64))  # 256 bytes for 4 units
            words = [load(b, b.add(start, at), I32_16, 64) for start in starts]
            if len(x_rows) == 1:
                for start in starts:
                    emit_prefetch(b, b.add(b.add(start, at), int64(_AHEAD)))
            for index in range(4):
                pairs = [fp4_pairs(b, word, index) for word in words]
                for row, x in enumerate(x_rows):
                    place = b.add(x, b.mul(b.add(b.add(unit, inner), int64(index)), int64(x_bytes)))
                    if dtype == "f32":
                        for half, widen in enumerate((pair_low, pair_high)):
                            factor = broadcast(b, load(b, b.add(place, int64(4 * half)), F32, 4), F32_16)
                            for p, pair in enumerate(pairs):
                                at_sum = row * len(weights) + p
                                sums[at_sum] = multiply_add(b, widen(b, pair), factor, sums[at_sum])
                    else:
                        factor = broadcast(b, load(b, place, I32, 4), I32_16)
                        for p, pair in enumerate(pairs):
                            at_sum = row * len(weights) + p
                            sums[at_sum] = dot_pairs(b, sums[at_sum], pair, factor)
            return sums

        sums = Loop(b, int64(GROUP_UNITS), 4, zeros, line).results
        factors = [_scale(b, b.add(start, scale)) for start, scale in zip(starts, scales, strict=True)]
        return [
            multiply_add(b, factors[index % len(weights)], one, total)
            for index, (one, total) in enumerate(zip(sums, totals, strict=True))
        ]

    return Loop(b, units, GROUP_UNITS, totals, group).results


def _scale(b, address):
    """Load 16 scales of 8 bits; return 2 ** (scale - 127) in float32."""
    exponents = b.zext(load(b, address, _BYTES_16, 16), I32_16)
    # scale 0 is 2 ** -127, which float32 holds as a subnormal number: the highest bit of the fraction
    is_zero = b.icmp_signed("==", exponents, constant(I32_16, 0))
    bits = b.select(is_zero, constant(I32_16, 1 << 22), b.shl(exponents, constant(I32_16, 23)))
    return b.bitcast(bits, F32_16)
