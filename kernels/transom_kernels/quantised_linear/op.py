"""The operators `quantised_linear` and `quantised_gated_linear`: linear layers over weights in 8 or 4 bits.

Rows of the input are rounded, too: to 16-bit integers with a scale for each group of 32 columns, which changes results less than
bfloat16 would. The integers of a group are multiplied exactly, and the groups' products are added in float32, in order. So a row's
result is the same for any number of rows or threads.

Legend: M rows, K input width, N output width, G groups of 32 columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.quantised_linear.layout import GROUP, SMALLEST, ZERO
from transom_kernels.quantised_linear.weights import Activation, PackedPanels, QuantisedRows

LARGEST = 127 * 256  # the largest magnitude of a rounded element


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

    `x` is [M, K]; its rows may lie any stride apart. `residual` is [M, N] in the result's dtype, which is `out_dtype` or else that
    of `x`. Everything after the product is computed in float32 and rounded once.

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


def quantised_gated_linear(x: torch.Tensor, weight: PackedPanels, activation: Activation) -> torch.Tensor:
    """Return `activation(x @ gate.T + gate bias) * (x @ up.T + up bias)`, [M, N] in the dtype of `x`.

    Raises:
        ValueError: shapes do not fit, or the weight is not gated.
    """
    _check(x, weight, is_gated=True)
    if uses_cpu_kernels(x):
        from transom_kernels.quantised_linear.cpu import fits, quantised_gated_linear_cpu

        if fits(x, x.dtype):
            return quantised_gated_linear_cpu(x, weight, activation)
    return quantised_gated_linear_reference(x, weight, activation)


def quantised_linear_reference(
    x: torch.Tensor,
    weight: PackedPanels,
    residual: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `quantised_linear` in torch, group by group: the specification."""
    (y,) = _products(x, weight)
    y = y * scale
    if soft_cap is not None:
        y = soft_cap * torch.tanh(y / soft_cap)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)


def quantised_gated_linear_reference(x: torch.Tensor, weight: PackedPanels, activation: Activation) -> torch.Tensor:
    """Compute `quantised_gated_linear` in torch, group by group: the specification."""
    gate, up = _products(x, weight)
    return ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up).to(x.dtype)


def quantise_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [M, K] as integers from -32512 to 32512 [M, G, 32], and the groups' scales [M, G], both in float32."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.view(len(x), padded.shape[1] // GROUP, GROUP)
    largest = groups.abs().amax(dim=-1)
    inverse = torch.where(largest < SMALLEST, 0.0, torch.full_like(largest, LARGEST) / largest)
    return torch.round(groups * inverse[..., None]), largest * (1 / LARGEST)


def _products(x: torch.Tensor, weight: PackedPanels) -> list[torch.Tensor]:
    """Return x @ weight.T + bias in float32 for the weight, or for gate and up."""
    integers, scales = quantise_activations(x)
    return [
        _product(integers, scales, rows) + (0.0 if bias is None else bias)
        for rows, bias in zip(weight.unpacked(), weight.biases(), strict=True)
    ]


def _product(x: torch.Tensor, x_scales: torch.Tensor, weight: QuantisedRows) -> torch.Tensor:
    """Return x @ weight.T [M, N] in float32. The integer products of a group are summed exactly, in float64."""
    total = torch.zeros(len(x), len(weight.levels))
    levels = weight.levels.view(len(weight.levels), -1, GROUP)
    for group in range(x.shape[1]):
        scale = x_scales[:, group, None]
        product = (x[:, group].double() @ (levels[:, group].double() - ZERO[weight.format]).T).float()
        total += product * (scale * weight.scales[:, group].float())
        if weight.minima is not None:
            total += scale * x[:, group].sum(dim=-1, keepdim=True) * weight.minima[:, group].float()
    return total


def _check(x: torch.Tensor, weight: PackedPanels, *, is_gated: bool) -> None:
    if x.dim() != 2 or x.shape[1] != weight.width:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight [{weight.num_outputs}, {weight.width}].")
    if is_gated != weight.is_gated:
        raise ValueError(f"The weight is {'' if weight.is_gated else 'not '}gated; use the other of the two operators.")
