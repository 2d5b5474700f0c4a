"""Launches of the RMS normalisation kernels.

Legend: T tokens, H heads, N row width, D head width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import next_power_of_two, warps_for
from transom_kernels.rms_norm.kernel import norm_heads, norm_rows

HEAD_ELEMENTS = 2048  # of a program of `norm_heads`


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    inner: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is that of `op.rms_norm`."""
    width = x.shape[1]
    sums = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = sums if weight is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_two(width)
    if len(x):
        norm_rows[(len(x),)](
            x, x if residual is None else residual, x if inner is None else inner, x if weight is None else weight, out, sums,
            x.stride(0), 0 if residual is None else residual.stride(0), factor, eps,
            N=width, HAS_INNER=inner is not None, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
            BLOCK_N=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out, sums


def head_norm_triton_(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """The contract is that of `heads.head_norm_`."""
    tokens, heads, width = x.shape
    block_d = next_power_of_two(width)
    block_h = min(next_power_of_two(heads), max(1, HEAD_ELEMENTS // block_d))
    if x.numel():
        norm_heads[(tokens, -(-heads // block_h))](
            x, x if weight is None else weight.contiguous(), x.stride(0), x.stride(1), eps,
            H=heads, D=width, HAS_WEIGHT=weight is not None, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
