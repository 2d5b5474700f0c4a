"""The kernels of linear layers over quantised weights: products, with what belongs to the layer done in float32 before the one
rounding. `cpu.py` launches them.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.rows import limited_gate, limited_up, make_gated, soft_capped
from transom_kernels.cpu.simd import float_of_bits, load_f32, row_access, splat
from transom_kernels.cpu.work import argument, claim, each_item, finish, helper, scratch
from transom_kernels.quantised_linear.layout import GROUP, LINE, MOST_ROWS, PANEL, RECORD, ZERO, group_bytes
from transom_kernels.quantised_linear.rounded_rows import block_rows, make_round_rows
from transom_kernels.quantised_linear.tile_product import make_tile_product

_SUMS = MOST_ROWS * LINE  # bytes of a block's sums


def make_rounded_rows(dtype: str) -> Any:
    """Round rows to 16 bits; an item is MOST_ROWS rows. Arguments: x, records, M, K, row stride of x in bytes, zero."""
    round_rows = make_round_rows(dtype)

    @each_item
    def rounded_rows(arguments, thread, item):
        first = item * MOST_ROWS
        count = min(MOST_ROWS, argument(arguments, 2) - first)
        width, stride = argument(arguments, 3), argument(arguments, 4)
        records = argument(arguments, 1) + first * ((width + GROUP - 1) // GROUP) * RECORD
        round_rows(argument(arguments, 0) + first * stride, stride, count, width, argument(arguments, 5), records)

    return rounded_rows


def make_quantised_linear(dtype: str, out_dtype: str, format: str, activation: str | None) -> Any:
    """out = residual + cap(scale * (x @ weight.T + bias)); with an activation, activation(x @ gate.T + bias) * (x @ up.T + bias).

    An item is a range of panels (of pairs of panels, if gated) and a range of rows. Arguments:
     0 x, 1 its row stride in bytes, 2 M, 3 K, 4 records of x, or 0 where every thread rounds all rows for itself,
     5 levels, 6 scales, 7 bias or 0, 8 N, 9 panels (or pairs), 10 panels of an item, 11 rows of an item, 12 items along the rows,
    13 residual or 0, 14 its row stride, 15 out, 16 its row stride, 17 scale, 18 soft cap or 0, 19 limit or 0.
    """
    round_rows, product, zero = make_round_rows(dtype), make_tile_product(format), ZERO[format]
    halves = 1 if activation is None else 2
    level_bytes, scale_bytes = group_bytes(format)
    store_tile = _store_output(out_dtype) if activation is None else _store_gated(out_dtype, activation)

    def quantised_linear(arguments, thread):
        item = claim(thread)
        if item < 0:
            return
        num_rows, width = argument(arguments, 2), argument(arguments, 3)
        num_groups = (width + GROUP - 1) // GROUP
        sums, records = scratch(thread), argument(arguments, 4)
        if records == 0:
            records = sums + halves * _SUMS
            x, stride = argument(arguments, 0), argument(arguments, 1)
            for first in range(0, num_rows, MOST_ROWS):
                here = records + first * num_groups * RECORD
                round_rows(x + first * stride, stride, min(MOST_ROWS, num_rows - first), width, zero, here)
        levels, scales = argument(arguments, 5), argument(arguments, 6)
        panels_each, rows_each, num_parts = argument(arguments, 10), argument(arguments, 11), argument(arguments, 12)
        while item >= 0:
            first_row, first_panel = item % num_parts * rows_each, item // num_parts * panels_each
            last_row = min(num_rows, first_row + rows_each)
            for panel in range(first_panel, min(argument(arguments, 9), first_panel + panels_each)):
                row = first_row
                while row < last_row:
                    count = block_rows(last_row - row)
                    here = records + row * num_groups * RECORD
                    for half in range(halves):
                        group = (panel * halves + half) * num_groups
                        weight, factors = levels + group * level_bytes, scales + group * scale_bytes
                        product(count, weight, factors, here, num_groups, sums + half * _SUMS)
                    store_tile(arguments, sums, panel, row, count)
                    row += count
            finish(thread)
            item = claim(thread)

    return quantised_linear


def _store_output(dtype: str) -> Any:
    """Make store_output(arguments, sums, panel, first row, rows): bias, scale, soft cap, residual, and the rounding."""
    load, load_part, store, store_part, size = row_access(dtype)

    @helper
    def store_output(arguments, sums, panel, first_row, count):
        bias, residual, out = argument(arguments, 7), argument(arguments, 13), argument(arguments, 15)
        scale, cap = float_of_bits(argument(arguments, 17)), float_of_bits(argument(arguments, 18))
        lanes, column = argument(arguments, 8) - panel * PANEL, panel * PANEL * size
        for row in range(count):
            y = load_f32(sums + row * LINE)
            if bias:
                y = y + load_f32(bias + panel * LINE)
            y = y * splat(scale)
            if cap != 0:
                y = soft_capped(y, cap)
            before = residual + (first_row + row) * argument(arguments, 14) + column
            place = out + (first_row + row) * argument(arguments, 16) + column
            if lanes >= PANEL:
                if residual:
                    y = y + load(before)
                store(place, y)
            else:
                if residual:
                    y = y + load_part(before, lanes)
                store_part(place, y, lanes)

    return store_output


def _store_gated(dtype: str, activation: str) -> Any:
    """Make store_gated(arguments, sums, pair of panels, first row, rows): biases, limits, activation, product and rounding."""
    _, _, store, store_part, size = row_access(dtype)
    gated = make_gated(activation)

    @helper
    def store_gated(arguments, sums, pair, first_row, count):
        bias, out, limit = argument(arguments, 7), argument(arguments, 15), float_of_bits(argument(arguments, 19))
        lanes = argument(arguments, 8) - pair * PANEL
        for row in range(count):
            gate, up = load_f32(sums + row * LINE), load_f32(sums + _SUMS + row * LINE)
            if bias:
                gate = gate + load_f32(bias + 2 * pair * LINE)
                up = up + load_f32(bias + (2 * pair + 1) * LINE)
            if limit != 0:
                gate, up = limited_gate(gate, limit), limited_up(up, limit)
            y = gated(gate, up)
            place = out + (first_row + row) * argument(arguments, 16) + pair * PANEL * size
            if lanes >= PANEL:
                store(place, y)
            else:
                store_part(place, y, lanes)

    return store_gated
