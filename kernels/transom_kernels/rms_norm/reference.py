"""Root-mean-square normalisation in float32: the specification of `rms_norm`."""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `op.rms_norm`."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def head_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `heads.head_norm_`; returns the normalised copy."""
    ones = torch.ones(x.shape[1:]) if weight is None else weight
    heads = [rms_norm_reference(x[:, head], ones[head], eps) for head in range(x.shape[1])]
    return torch.stack(heads, dim=1)
