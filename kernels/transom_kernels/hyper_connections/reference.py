"""Streams in torch: the specification, and what computes where Triton does not.

Legend: T tokens, S streams, N hidden width, M coefficients: S (S + 2), or S.
"""

from __future__ import annotations

import torch


def hc_norm_reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See `op.hc_norm`."""
    flat = x.flatten(1).float()
    return flat * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + eps)


def hc_pre_reference(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `op.hc_pre`."""
    size = x.shape[1]
    collapse, expand, mix = (projected * scale + base).split_with_sizes((size, size, size * size), dim=1)
    balanced = _balance(mix.view(-1, size, size).softmax(dim=2) + eps, rounds, eps)
    return _weighed_sum(x, collapse.sigmoid() + eps), 2 * expand.sigmoid(), balanced


def hc_head_reference(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """See `op.hc_head`."""
    return _weighed_sum(x, (projected * scale + base).sigmoid() + eps)


def hc_post_reference(y: torch.Tensor, x: torch.Tensor, expand: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """See `op.hc_post`."""
    mixed = torch.bmm(mix.to(x.dtype).transpose(1, 2), x)
    return mixed.addcmul_(expand.to(x.dtype)[:, :, None], y[:, None])


def _balance(mix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Sinkhorn's rounds: columns and rows add up to 1, so that mixing neither grows nor shrinks the streams."""
    # on CPUs adding a number would make a tensor of it each time; elsewhere making a tensor would wait for the device
    addend = mix.new_tensor(eps) if mix.device.type == "cpu" else eps
    for turn in range(2 * rounds - 1):
        mix.div_(mix.sum(dim=2 if turn % 2 else 1, keepdim=True).add_(addend))
    return mix


def _weighed_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (weight[:, :, None] * x).sum(dim=1).to(x.dtype)
