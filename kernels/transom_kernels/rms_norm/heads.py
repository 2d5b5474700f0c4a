"""The operator `head_norm_`: RMS normalisation of every head of every token, in place (QK norm, for instance).

Legend: T tokens, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels, uses_triton


def head_norm_(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """Normalise each head of `x` [T, H, D] in place: x / rms(x) * weight, where rms is taken over the head.

    `x` may have strides. `weight` is [H, D]; None means no weight. A float32 weight over heads of fewer bits is multiplied in
    float32, and the product is rounded once.

    Raises:
        ValueError: the weight's shape does not fit.
    """
    if weight is not None and weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; give [heads, width].")
    if uses_triton(x) and x.stride(2) == 1:
        from transom_kernels.rms_norm.gpu import head_norm_triton_

        head_norm_triton_(x, weight, eps)
        return
    if uses_cpu_kernels(x):
        from transom_kernels.rms_norm.cpu import head_norm_cpu_, head_norm_fits

        if head_norm_fits(x, weight):
            head_norm_cpu_(x, weight, eps)
            return
    wide = x if weight is None or weight.dtype == x.dtype else x.to(weight.dtype)
    normed = F.rms_norm(wide, x.shape[-1:], None, eps)
    if weight is None:
        x.copy_(normed)
    else:
        torch.mul(normed, weight, out=x)
