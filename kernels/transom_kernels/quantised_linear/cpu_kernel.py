"""The CPU kernels of linear layers over quantised weights: products, then bias, scale, cap, residual or activation in float32, then
one rounding. `cpu.py` launches them.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.layer_output import make_store_gated, make_store_output
from transom_kernels.cpu.simd import load_f32
from transom_kernels.cpu.work import argument, claim, each_item, finish, row_address, scratch
from transom_kernels.quantised_linear.cpu import AT, ROUNDED
from transom_kernels.quantised_linear.layout import GROUP, LINE, MOST_ROWS, PANEL, RECORD, ZERO, group_bytes
from transom_kernels.quantised_linear.rounded_rows import block_rows, make_round_rows
from transom_kernels.quantised_linear.tile_product import make_tile_product

_SUMS = MOST_ROWS * LINE  # bytes of the sums of a block of rows


def make_rounded_rows(dtype: str) -> Any:
    """Build the kernel that rounds rows to 16 bits. A work item is MOST_ROWS rows."""
    round_rows = make_round_rows(dtype)

    @each_item
    def rounded_rows(arguments, thread, item):
        first, width, stride = (
            item * MOST_ROWS,
            argument(arguments, ROUNDED.width),
            argument(arguments, ROUNDED.x.stride),
        )
        count = min(MOST_ROWS, argument(arguments, ROUNDED.num_rows) - first)
        records = argument(arguments, ROUNDED.records) + first * ((width + GROUP - 1) // GROUP) * RECORD
        x = row_address(arguments, ROUNDED.x, first)
        round_rows(x, stride, count, width, argument(arguments, ROUNDED.zero), records)

    return rounded_rows


def make_quantised_linear(dtype: str, out_dtype: str, format: str, activation: str | None) -> Any:
    """Build the kernel: out = residual + cap(scale * (x @ weight.T + bias)).

    With an activation, out = activation(x @ gate.T + bias) * (x @ up.T + bias). A work item is a range of panels (of pairs of
    panels, if gated) and a range of rows.
    """
    round_rows, product, zero = make_round_rows(dtype), make_tile_product(format), ZERO[format]
    halves = 1 if activation is None else 2
    level_bytes, scale_bytes = group_bytes(format)
    store_output = make_store_output(out_dtype, AT.output)
    store_gated = make_store_gated(out_dtype, activation or "silu", AT.output)

    def quantised_linear(arguments, thread):
        item = claim(thread)
        if item < 0:
            return
        num_rows, width = argument(arguments, AT.num_rows), argument(arguments, AT.width)
        num_groups = (width + GROUP - 1) // GROUP
        sums, records = scratch(thread), argument(arguments, AT.records)
        if records == 0:
            records = sums + halves * _SUMS
            for first in range(0, num_rows, MOST_ROWS):
                x, stride = row_address(arguments, AT.x, first), argument(arguments, AT.x.stride)
                here = records + first * num_groups * RECORD
                round_rows(x, stride, min(MOST_ROWS, num_rows - first), width, zero, here)
        levels, scales = argument(arguments, AT.levels), argument(arguments, AT.scales)
        panels_each, rows_each = argument(arguments, AT.panels_of_item), argument(arguments, AT.rows_of_item)
        num_parts = argument(arguments, AT.items_of_rows)
        while item >= 0:
            first_row, first_panel = item % num_parts * rows_each, item // num_parts * panels_each
            last_row = min(num_rows, first_row + rows_each)
            for panel in range(first_panel, min(argument(arguments, AT.num_panels), first_panel + panels_each)):
                row = first_row
                while row < last_row:
                    count = block_rows(last_row - row)
                    here = records + row * num_groups * RECORD
                    for half in range(halves):
                        group = (panel * halves + half) * num_groups
                        weight, factors = levels + group * level_bytes, scales + group * scale_bytes
                        product(count, weight, factors, here, num_groups, sums + half * _SUMS)
                    for r in range(count):
                        y = load_f32(sums + r * LINE)
                        if halves == 2:
                            store_gated(arguments, y, load_f32(sums + _SUMS + r * LINE), row + r, panel * PANEL)
                        else:
                            store_output(arguments, y, row + r, panel * PANEL)
                    row += count
            finish(thread)
            item = claim(thread)

    return quantised_linear
