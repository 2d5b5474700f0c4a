"""The CPU kernels of linear layers over quantised weights, and their launches.

A kernel computes products, then bias, scale, cap, residual or activation in float32, then one rounding.

- panel: 16 outputs of a weight. level: the unsigned integer that stands for an element of the weight (`weights.py`).
- record: 32 columns of a row of x, rounded to 16-bit integers (`row_products.py`).

Legend: M rows, K input width, N output width, G groups of 32 columns.
"""

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.layer_output import OutputArguments, make_store_gated, make_store_output
from transom_kernels.cpu.simd import load_f32
from transom_kernels.cpu.work import argument, claim, each_item, finish, row_address, scratch
from transom_kernels.quantised_linear.row_products import block_rows, make_round_rows, make_tile_product
from transom_kernels.quantised_linear.weights import (
    GROUP,
    LINE,
    MOST_ROWS,
    PANEL,
    RECORD,
    ZERO,
    PackedPanels,
    group_bytes,
)

_MODULE = "transom_kernels.quantised_linear.cpu"
# every thread rounds up to this many rows for itself, which takes less time than another launch
_ROWS_EACH_THREAD_ROUNDS = 4
_ROWS_OF_ITEM = 64
# least items and most panels of an item: with small items all threads finish at about the same time
_LEAST_ITEMS, _MOST_PANELS = 32, 16
_SUMS = MOST_ROWS * LINE  # bytes of the sums of a block of rows


class RoundedRowsArguments(NamedTuple):
    """The argument words of `rounded_rows`."""

    x: RowArguments  # [M, K]
    records: torch.Tensor
    num_rows: int  # M
    width: int  # K
    zero: int  # the level of an element of 0


class QuantisedLinearArguments(NamedTuple):
    """The argument words of `quantised_linear`."""

    x: RowArguments  # [M, K]
    num_rows: int  # M
    width: int  # K
    records: torch.Tensor | None  # the rounded rows of x; None: every thread rounds all rows for itself
    levels: torch.Tensor
    scales: torch.Tensor
    num_panels: int  # if the weight is gated: pairs of panels
    panels_of_item: int
    rows_of_item: int
    items_of_rows: int
    output: OutputArguments


ROUNDED, AT = numbers_of(RoundedRowsArguments), numbers_of(QuantisedLinearArguments)


def rounded_rows(x: torch.Tensor, zero: int) -> torch.Tensor:
    """Return the records of rows (`row_products.py`), for weights in which level `zero` stands for 0."""
    num_rows, width = x.shape
    records = empty((num_rows * -(-width // GROUP) * RECORD,), torch.uint8)
    kernel = cpu_kernel(_MODULE, "make_rounded_rows", dtype=DTYPES[x.dtype])
    arguments = RoundedRowsArguments(x=RowArguments.of(x), records=records, num_rows=num_rows, width=width, zero=zero)
    launch(kernel, -(-num_rows // MOST_ROWS), arguments)
    return records


def launch_quantised(
    x: torch.Tensor, weight: PackedPanels, output: OutputArguments, out_dtype: torch.dtype, activation: str | None
) -> None:
    """Write residual + cap(scale * (x @ weight.T + bias)) of `x` [M, K] to `output.out` [M, N] in `out_dtype`.

    With an activation the weight is gated, and the output is activation(x @ gate.T + bias) * (x @ up.T + bias).
    """
    num_rows, width = x.shape
    if num_rows == 0:
        return
    x = x if x.stride(1) == 1 or width == 1 else x.contiguous()
    rounds = num_rows <= _ROWS_EACH_THREAD_ROUNDS
    num_panels = -(-weight.num_outputs // PANEL)
    panels_each = max(1, min(_MOST_PANELS, num_panels // _LEAST_ITEMS))
    num_parts = -(-num_rows // _ROWS_OF_ITEM)
    launch(
        cpu_kernel(
            _MODULE,
            "make_quantised_linear",
            dtype=DTYPES[x.dtype],
            out_dtype=DTYPES[out_dtype],
            format=weight.format,
            activation=activation,
        ),
        -(-num_panels // panels_each) * num_parts,
        QuantisedLinearArguments(
            x=RowArguments.of(x),
            num_rows=num_rows,
            width=width,
            records=None if rounds else rounded_rows(x, ZERO[weight.format]),
            levels=weight.levels,
            scales=weight.scales,
            num_panels=num_panels,
            panels_of_item=panels_each,
            rows_of_item=_ROWS_OF_ITEM,
            items_of_rows=num_parts,
            output=output,
        ),
        scratch_bytes=2 * _SUMS + (num_rows * -(-width // GROUP) * RECORD if rounds else 0),
    )


# --- kernels


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
