"""The operator `layer_norm`: (x - mean(x)) / sqrt(variance(x) + eps) * weight of each row, in float32.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the normalised rows of `x` [T, N], rounded once; `weight` is [N] in the dtype of `x`.

    Raises:
        ValueError: the width does not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}.")
    if uses_cpu_kernels(x):
        from transom_kernels.layer_norm.cpu import fits_cpu, layer_norm_cpu

        if fits_cpu(x, weight):
            return layer_norm_cpu(x, weight, eps)
    return layer_norm_reference(x, weight, eps)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `layer_norm` in torch: the specification."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (centred * scale * weight.float()).to(x.dtype)
