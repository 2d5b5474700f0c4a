"""Launches the CPU kernels of `quantised_linear` and `quantised_gated_linear`, and declares their arguments.

Legend: M rows, K input width, N output width, G groups of 32 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.layer_output import OutputArguments
from transom_kernels.quantised_linear.layout import GROUP, LINE, MOST_ROWS, PANEL, RECORD, ZERO
from transom_kernels.quantised_linear.weights import Activation, PackedPanels

_MODULE = "transom_kernels.quantised_linear.cpu_kernel"
# up to this many rows are rounded by every thread for itself, which costs less than another launch
_ROWS_EACH_THREAD_ROUNDS = 4
_ROWS_OF_ITEM = 64
_LEAST_ITEMS, _MOST_PANELS = 32, 16  # small items (of up to 16 panels) let all threads finish at about the same time
_SUMS_BYTES = 2 * MOST_ROWS * LINE


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
    num_panels: int  # or pairs of panels, if the weight is gated
    panels_of_item: int
    rows_of_item: int
    items_of_rows: int
    output: OutputArguments


ROUNDED, AT = numbers_of(RoundedRowsArguments), numbers_of(QuantisedLinearArguments)


def fits(x: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Return whether the kernels support rows of this dtype."""
    return x.dtype in DTYPES and out_dtype in DTYPES


def quantised_linear_cpu(
    x: torch.Tensor,
    weight: PackedPanels,
    residual: torch.Tensor | None,
    *,
    scale: float,
    soft_cap: float | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return `residual + cap(scale * (x @ weight.T + bias))` [M, N] of `x` [M, K]; cap(y) is `soft_cap * tanh(y / soft_cap)`."""
    out = empty((x.shape[0], weight.num_outputs), out_dtype)
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    output = OutputArguments(
        out=RowArguments.of(out),
        num_outputs=weight.num_outputs,
        bias=weight.bias,
        residual=RowArguments.of(residual),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    _launch(x, weight, output, out_dtype, activation=None)
    return out


def quantised_gated_linear_cpu(x: torch.Tensor, weight: PackedPanels, activation: Activation) -> torch.Tensor:
    """Return `activation(x @ gate.T + gate bias) * (x @ up.T + up bias)` [M, N] of `x` [M, K]."""
    out = empty((x.shape[0], weight.num_outputs), x.dtype)
    output = OutputArguments(RowArguments.of(out), weight.num_outputs, weight.bias)
    _launch(x, weight, output, x.dtype, activation=activation)
    return out


def rounded_rows(x: torch.Tensor, zero: int) -> torch.Tensor:
    """Return the records of rows (`rounded_rows.py`), for weights in which level `zero` stands for 0."""
    num_rows, width = x.shape
    records = empty((num_rows * -(-width // GROUP) * RECORD,), torch.uint8)
    kernel = cpu_kernel(_MODULE, "make_rounded_rows", dtype=DTYPES[x.dtype])
    arguments = RoundedRowsArguments(x=RowArguments.of(x), records=records, num_rows=num_rows, width=width, zero=zero)
    launch(kernel, -(-num_rows // MOST_ROWS), arguments)
    return records


def _launch(
    x: torch.Tensor, weight: PackedPanels, output: OutputArguments, out_dtype: torch.dtype, *, activation: str | None
) -> None:
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
        scratch_bytes=_SUMS_BYTES + (num_rows * -(-width // GROUP) * RECORD if rounds else 0),
    )
