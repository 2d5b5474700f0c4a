"""Launches the kernels of `quantised_linear` and `quantised_gated_linear`.

Legend: M rows, K input width, N output width, G groups of 32 columns.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.quantised_linear.layout import GROUP, LINE, MOST_ROWS, PANEL, RECORD, ZERO
from transom_kernels.quantised_linear.weights import Activation, PackedPanels

_MODULE = "transom_kernels.quantised_linear.cpu_kernel"
_ROWS_EACH_THREAD_ROUNDS = 4  # up to so many, rounding them in every thread costs less than a launch of its own
_ROWS_OF_ITEM = 64
_LEAST_ITEMS, _MOST_PANELS = 32, 16  # panels of an item: few enough that all threads finish at about the same time
_SUMS_BYTES = 2 * MOST_ROWS * LINE


def fits(x: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether kernels take rows of this dtype."""
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
    """`residual + cap(scale * (x @ weight.T + bias))` [M, N] of `x` [M, K]; see `op.quantised_linear`."""
    out = empty((x.shape[0], weight.num_outputs), out_dtype)
    _launch(x, weight, out, residual=residual, scale=scale, soft_cap=soft_cap or 0.0)
    return out


def quantised_gated_linear_cpu(
    x: torch.Tensor, weight: PackedPanels, activation: Activation, *, limit: float | None
) -> torch.Tensor:
    """`activation(x @ gate.T + gate bias) * (x @ up.T + up bias)` [M, N]; see `op.quantised_gated_linear`."""
    out = empty((x.shape[0], weight.num_outputs), x.dtype)
    _launch(x, weight, out, activation=activation, limit=limit or 0.0)
    return out


def rounded_rows(x: torch.Tensor, zero: int) -> torch.Tensor:
    """The records of rows (`rounded_rows`), for weights whose elements of 0 have the level `zero`."""
    num_rows, width = x.shape
    records = empty((num_rows * -(-width // GROUP) * RECORD,), torch.uint8)
    kernel = cpu_kernel(_MODULE, "make_rounded_rows", dtype=DTYPES[x.dtype])
    launch(kernel, -(-num_rows // MOST_ROWS), [x, records, num_rows, width, _row_bytes(x), zero])
    return records


def _launch(
    x: torch.Tensor,
    weight: PackedPanels,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    limit: float = 0.0,
) -> None:
    num_rows, width = x.shape
    if num_rows == 0:
        return
    x = x if x.stride(1) == 1 or width == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    rounds = num_rows <= _ROWS_EACH_THREAD_ROUNDS
    kernel = cpu_kernel(
        _MODULE,
        "make_quantised_linear",
        dtype=DTYPES[x.dtype],
        out_dtype=DTYPES[out.dtype],
        format=weight.format,
        activation=activation,
    )
    num_panels = -(-weight.num_outputs // PANEL)
    panels_each = max(1, min(_MOST_PANELS, num_panels // _LEAST_ITEMS))
    num_parts = -(-num_rows // _ROWS_OF_ITEM)
    launch(
        kernel,
        -(-num_panels // panels_each) * num_parts,
        [
            x, _row_bytes(x), num_rows, width, None if rounds else rounded_rows(x, ZERO[weight.format]),
            weight.levels, weight.scales, weight.bias, weight.num_outputs, num_panels, panels_each, _ROWS_OF_ITEM, num_parts,
            residual, 0 if residual is None else _row_bytes(residual), out, _row_bytes(out), scale, soft_cap, limit,
        ],
        scratch_bytes=_SUMS_BYTES + (num_rows * -(-width // GROUP) * RECORD if rounds else 0),
    )  # fmt: skip


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()
