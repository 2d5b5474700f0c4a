"""The operator `rms_norm`: x / rms(x) * weight in float32, optionally of a sum with the residual.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels, uses_triton

_FEW_ROWS = 64  # with fewer, torch's own operator is faster (fewer calls); with more, fewer passes over memory are


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    inner: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(sum, weight) and the sum, both [T, N] in the dtype of `x`, where the sum is (residual + x) * factor.

    `x` and `residual` are [T, N], `weight` and `inner` [N]. With `inner` the sum is (residual + rms_norm(x, inner)) * factor.
    Without a weight the first result is the sum, too. Without a residual the sum is `x` itself, which may have more dimensions.
    A float32 weight over rows of fewer bits is multiplied in float32, and the product is rounded once.

    Raises:
        ValueError: widths do not fit, or `inner`, `factor` or a missing weight come without a residual.
    """
    _check(x, weight, residual, inner, factor)
    if uses_triton(x) and x.stride(-1) == 1 and (residual is None or (x.dim() == 2 and residual.stride(-1) == 1)):
        from transom_kernels.rms_norm.gpu import rms_norm_triton

        if x.dim() == 2:
            return rms_norm_triton(x, weight, eps, residual, inner=inner, factor=factor)
        return rms_norm_triton(x.reshape(-1, x.shape[-1]), weight, eps)[0].view_as(x), x
    if uses_cpu_kernels(x):
        from transom_kernels.rms_norm.cpu import rms_norm_cpu, rms_norm_fits

        if rms_norm_fits(x, weight, residual, inner):
            return rms_norm_cpu(x, weight, eps, residual, inner=inner, factor=factor)
    if residual is not None:
        x = residual + (x if inner is None else _normalised(x, inner, eps))
        x = x if factor == 1.0 else x * factor
    return x if weight is None else _normalised(x, weight, eps), x


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm by torch; with many rows in steps that pass over memory less often than torch's operator."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    if x.shape[0] < _FEW_ROWS or x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    inner: torch.Tensor | None,
    factor: float,
) -> None:
    wrong = [part for part in (weight, inner) if part is not None and part.shape != x.shape[-1:]]
    if wrong or (residual is not None and residual.shape != x.shape):
        other = None if residual is None else tuple(residual.shape)
        shapes = [tuple(part.shape) for part in wrong]
        raise ValueError(f"x {tuple(x.shape)} does not fit weights {shapes} or residual {other}.")
    if residual is None and (weight is None or inner is not None or factor != 1.0):
        raise ValueError("weight None, inner and factor are for sums: give a residual.")
