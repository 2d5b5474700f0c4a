"""Launches of the CPU kernels of RMS normalisation.

Legend: T rows or tokens, N row width, H heads, D head width.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import CpuKernel, cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch

ITEM_ELEMENTS = 2048  # about as many elements as one item of work normalises

_KERNELS = "transom_kernels.rms_norm.cpu_kernel"


def rms_norm_fits(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, inner: torch.Tensor | None
) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    weights = [part for part in (weight, inner) if part is not None]
    rows = [x] if residual is None else [x, residual]
    return (
        len({part.dtype for part in weights}) < 2
        and all(part.dtype in DTYPES and part.stride(-1) == 1 for part in weights)
        and x.dtype in DTYPES
        and all(part.dtype == x.dtype and part.stride(-1) == 1 and _is_matrix(part) for part in rows)
    )


def rms_norm_cpu(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    inner: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is that of `op.rms_norm`."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    sums = x if residual is None else empty(x.shape, x.dtype)
    out = sums if weight is None else empty(x.shape, x.dtype)
    per_item = max(1, ITEM_ELEMENTS // width)
    like = inner if weight is None else weight
    launch(
        _kernel("make_rms_norm", x, x if like is None else like),
        -(-num_rows // per_item),
        [
            x, residual, inner, weight, out, sums, num_rows, per_item, width, x.stride(-2) * x.element_size(),
            0 if residual is None else residual.stride(-2) * x.element_size(), factor, eps,
        ],
    )  # fmt: skip
    return out, sums


def head_norm_fits(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    fits = x.dtype in DTYPES and x.stride(2) == 1
    return fits and (weight is None or (weight.dtype in DTYPES and weight.is_contiguous()))


def head_norm_cpu_(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """The contract is that of `heads.head_norm_`."""
    tokens, heads, width = x.shape
    per_item = max(1, min(heads, ITEM_ELEMENTS // width))
    size = x.element_size()
    launch(
        _kernel("make_norm_heads", x, x if weight is None else weight),
        tokens * -(-heads // per_item),
        [x, weight, heads, width, per_item, x.stride(0) * size, x.stride(1) * size, eps],
    )


def _kernel(maker: str, x: torch.Tensor, weight: torch.Tensor) -> CpuKernel:
    return cpu_kernel(_KERNELS, maker, dtype=DTYPES[x.dtype], weight_dtype=DTYPES[weight.dtype])


def _is_matrix(x: torch.Tensor) -> bool:
    """Whether the rows of a tensor of two or more dimensions have one stride."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))
