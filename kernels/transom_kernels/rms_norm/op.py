"""`rms_norm`: x / rms(x) * weight, computed in float32.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_triton

_FEW_ROWS = 64  # below it torch's composite has fewer calls; above it fewer passes over memory win


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise `x` [T, N], or `x + residual` if given, by `weight` [N].

    A float32 weight over rows of fewer bits is multiplied in float32, and the product rounded once.
    Returns the normalised rows and the sum that was normalised (`x` itself without a residual).

    Raises:
        ValueError: widths that do not fit.
    """
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        other = None if residual is None else tuple(residual.shape)
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} or residual {other}.")
    if uses_triton(x) and x.stride(-1) == 1 and (x.dim() == 2 or residual is None):
        from transom_kernels.rms_norm.gpu import rms_norm_triton

        if x.dim() == 2:
            return rms_norm_triton(x, weight, eps, residual)
        return rms_norm_triton(x.reshape(-1, x.shape[-1]), weight, eps)[0].view_as(x), x
    if residual is not None:
        x = x + residual
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype), x
    if x.shape[0] < _FEW_ROWS or x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps), x
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight), x
