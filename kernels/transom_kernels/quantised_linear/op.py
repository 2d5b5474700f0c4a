"""The operators `quantised_linear` and `quantised_gated_linear`: linear layers over weights in 8 or 4 bits.

Rows of the input are rounded, too: to 16 bits, with a scale for each group of 32 columns, which changes results less than
bfloat16 does. The integers of a group are multiplied
exactly, and the groups' products are added in float32, in order. So a row's result is the same for any number of rows or threads.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.quantised_linear.reference import (
    quantised_gated_linear_reference,
    quantised_linear_reference,
)
from transom_kernels.quantised_linear.weights import Activation, PackedPanels


def quantised_linear(
    x: torch.Tensor,
    weight: PackedPanels,
    residual: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `residual + cap(scale * (x @ weight.T + bias))`, [M, N], where cap(y) is `soft_cap * tanh(y / soft_cap)`.

    `x` is [M, K]; its rows may lie apart. `residual` is [M, N] in the result's dtype, which is that of `x`, or `out_dtype`. All
    is computed in float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit, or the weight is gated.
    """
    _check(x, weight, is_gated=False)
    dtype = out_dtype or x.dtype
    wanted = (len(x), weight.num_outputs)
    if residual is not None and (residual.shape != wanted or residual.dtype != dtype):
        raise ValueError(f"The residual is {residual.dtype} {tuple(residual.shape)}; it must be {dtype} {wanted}.")
    if uses_cpu_kernels(x):
        from transom_kernels.quantised_linear.cpu import fits, quantised_linear_cpu

        if fits(x, dtype):
            return quantised_linear_cpu(x, weight, residual, scale=scale, soft_cap=soft_cap, out_dtype=dtype)
    return quantised_linear_reference(x, weight, residual, scale=scale, soft_cap=soft_cap, out_dtype=dtype)


def quantised_gated_linear(
    x: torch.Tensor, weight: PackedPanels, activation: Activation, *, limit: float | None = None
) -> torch.Tensor:
    """Return `activation(x @ gate.T + gate bias) * (x @ up.T + up bias)`, [M, N] in the dtype of `x`.

    With `limit` gates are clamped to at most `limit`, and ups to [-limit, limit], before the activation.

    Raises:
        ValueError: shapes do not fit, or the weight is not gated.
    """
    _check(x, weight, is_gated=True)
    if uses_cpu_kernels(x):
        from transom_kernels.quantised_linear.cpu import fits, quantised_gated_linear_cpu

        if fits(x, x.dtype):
            return quantised_gated_linear_cpu(x, weight, activation, limit=limit)
    return quantised_gated_linear_reference(x, weight, activation, limit=limit)


def _check(x: torch.Tensor, weight: PackedPanels, *, is_gated: bool) -> None:
    if x.dim() != 2 or x.shape[1] != weight.width:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight [{weight.num_outputs}, {weight.width}].")
    if is_gated != weight.is_gated:
        raise ValueError(f"The weight is {'' if weight.is_gated else 'not '}gated; use the other of the two operators.")
