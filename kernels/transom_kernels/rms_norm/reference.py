"""RMS normalisation in float32: the specification of `rms_norm` and `head_norm_`.

Legend: T rows or tokens, N width, H heads, D head width.
"""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.rms_norm`."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def head_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The contract is that of `heads.head_norm_`; returns the normalised copy."""
    ones = torch.ones(x.shape[1:]) if weight is None else weight
    heads = [rms_norm_reference(x[:, head], ones[head], eps) for head in range(x.shape[1])]
    return torch.stack(heads, dim=1)
