"""The operator `layer_norm`: (x - mean(x)) / sqrt(variance(x) + eps) * weight, in float32.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the normalised rows of `x` [T, N], rounded once; `weight` is [N] in the dtype of `x`.

    Raises:
        ValueError: the width does not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}.")
    if uses_cpu_kernels(x):
        from transom_kernels.layer_norm.cpu import layer_norm_cpu, layer_norm_fits

        if layer_norm_fits(x, weight):
            return layer_norm_cpu(x, weight, eps)
    return F.layer_norm(x, weight.shape, weight, None, eps)
