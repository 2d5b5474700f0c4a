"""LayerNorm in float32: the specification of `layer_norm`.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.layer_norm`."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (centred * scale * weight.float()).to(x.dtype)
