"""Hyper-connections in torch: the specification of the `hc_*` operators, and the implementation for CPUs.

Legend: T tokens, S residual streams, N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def hc_norm_reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.hc_norm`."""
    flat = x.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + eps)


def hc_project_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.hc_project`."""
    return F.linear(hc_norm_reference(x, eps), weight)


def hc_pre_reference(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract is that of `op.hc_pre`."""
    size = x.shape[1]
    pre, post, mix = (projected * scale + base).split_with_sizes((size, size, size * size), dim=1)
    balanced = _balance(mix.view(-1, size, size).softmax(dim=2) + eps, rounds, eps)
    return _weighted_sum(x, pre.sigmoid() + eps), 2 * post.sigmoid(), balanced


def hc_head_reference(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The contract is that of `op.hc_head`."""
    return _weighted_sum(x, (projected * scale + base).sigmoid() + eps)


def hc_post_reference(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """The contract is that of `op.hc_post`."""
    mixed = torch.bmm(mix.to(x.dtype).transpose(1, 2), x)
    return mixed.addcmul_(post.to(x.dtype)[:, :, None], y[:, None])


def _balance(mix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Sinkhorn's iteration: divide columns and rows by their sums in turn, until both (nearly) add up to 1."""
    # on CPUs torch makes a tensor of a number at each addition; on devices making a tensor waits for the device
    addend = mix.new_tensor(eps) if mix.device.type == "cpu" else eps
    for turn in range(2 * rounds - 1):
        mix.div_(mix.sum(dim=2 if turn % 2 else 1, keepdim=True).add_(addend))
    return mix


def _weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum over s of weight[t, s] * x[t, s], [T, N] in the dtype of `x`."""
    return (weight[:, :, None] * x).sum(dim=1).to(x.dtype)
