"""Products with a quantised weight, group by group, as the kernels compute them: the specification of `quantised_linear`.

Legend: M rows, K input width, N output width, G groups of 32 columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.quantised_linear.layout import GROUP, ZERO
from transom_kernels.quantised_linear.weights import Activation, PackedPanels, QuantisedRows

LARGEST = 127 * 256
SMALLEST = 1e-30  # groups without a larger magnitude are 0


def quantised_linear_reference(
    x: torch.Tensor,
    weight: PackedPanels,
    residual: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The contract is that of `op.quantised_linear`."""
    (y,) = _products(x, weight)
    y = y * scale
    if soft_cap is not None:
        y = soft_cap * torch.tanh(y / soft_cap)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)


def quantised_gated_linear_reference(
    x: torch.Tensor, weight: PackedPanels, activation: Activation, *, limit: float | None = None
) -> torch.Tensor:
    """The contract is that of `op.quantised_gated_linear`."""
    gate, up = _products(x, weight)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up).to(x.dtype)


def quantise_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [M, K] as integers from -32512 to 32512 [M, G, 32], and the groups' scales [M, G], both in float32."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.view(len(x), padded.shape[1] // GROUP, GROUP)
    largest = groups.abs().amax(dim=-1)
    inverse = torch.where(largest < SMALLEST, 0.0, torch.full_like(largest, LARGEST) / largest)
    return torch.round(groups * inverse[..., None]), largest * (1 / LARGEST)


def _products(x: torch.Tensor, weight: PackedPanels) -> list[torch.Tensor]:
    """x @ weight.T + bias in float32, of the weight or of gate and up."""
    integers, scales = quantise_activations(x)
    return [
        _product(integers, scales, rows) + (0.0 if bias is None else bias)
        for rows, bias in zip(weight.unpacked(), weight.biases(), strict=True)
    ]


def _product(x: torch.Tensor, x_scales: torch.Tensor, weight: QuantisedRows) -> torch.Tensor:
    """x @ weight.T [M, N] in float32. The integers of a group are summed in float64, exactly."""
    total = torch.zeros(len(x), len(weight.levels))
    levels = weight.levels.view(len(weight.levels), -1, GROUP)
    for group in range(x.shape[1]):
        scale = x_scales[:, group, None]
        product = (x[:, group].double() @ (levels[:, group].double() - ZERO[weight.format]).T).float()
        total += product * (scale * weight.scales[:, group].float())
        if weight.minima is not None:
            total += scale * x[:, group].sum(dim=-1, keepdim=True) * weight.minima[:, group].float()
    return total
