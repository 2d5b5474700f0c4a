"""The operator `rms_norm`: RMS normalisation of rows, or of the sums of rows and the residual.

rms_norm(x, weight) = x / sqrt(mean(x ** 2) + eps) * weight, computed in float32.

Legend: T rows, N row width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton


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
    Without `weight` both results are the sum. Without `residual` the sum is `x` itself, which may then have more dimensions.
    If the weight is float32 and the rows have fewer bits, both are multiplied in float32 and the product is rounded once.

    Raises:
        ValueError: widths do not fit, or `inner`, `factor` or a missing weight come without a residual.
    """
    _check(x, weight, residual, inner, factor)
    if uses_triton(x) and x.stride(-1) == 1 and (residual is None or (x.dim() == 2 and residual.stride(-1) == 1)):
        if x.dim() == 2:
            return _triton()(x, weight, eps, residual, inner=inner, factor=factor)
        return _triton()(x.reshape(-1, x.shape[-1]), weight, eps)[0].view_as(x), x
    if uses_cpu_kernels(x):
        from transom_kernels.rms_norm.cpu import rms_norm_cpu, rows_fit

        if rows_fit(x, weight, residual, inner):
            return rms_norm_cpu(x, weight, eps, residual, inner=inner, factor=factor)
    if residual is not None:
        x = (residual + (x if inner is None else rms_norm_reference(x, inner, eps))) * factor
    return x if weight is None else rms_norm_reference(x, weight, eps), x


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise over the last dimension in float32 and round once. This is the specification of `rms_norm`, in torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    inner: torch.Tensor | None,
    factor: float,
) -> None:
    row = x.shape[-1:]
    if (
        (weight is not None and weight.shape != row)
        or (inner is not None and inner.shape != row)
        or (residual is not None and residual.shape != x.shape)
    ):
        shapes = [None if part is None else tuple(part.shape) for part in (weight, inner, residual)]
        raise ValueError(f"x {tuple(x.shape)} does not fit weight, inner and residual {shapes}.")
    if residual is None and (weight is None or inner is not None or factor != 1.0):
        raise ValueError("weight None, inner and factor are for sums: give a residual.")


@cache
def _triton() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the implementation. It is imported once, here: an import statement would cost every call a microsecond."""
    from transom_kernels.rms_norm.gpu import rms_norm_triton

    return rms_norm_triton
