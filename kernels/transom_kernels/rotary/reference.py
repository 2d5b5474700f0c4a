"""Rotary position embedding, pair by pair: the specification of `rotary_`."""

from __future__ import annotations

import torch


def rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """The contract is that of `op.rotary_`; returns the rotated copy."""
    width = cos.shape[-1]
    out = x.clone()
    for pair in range(width // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
        out[..., i] = x[..., i] * cos[..., i] + x[..., j] * signed_sin[..., i]
        out[..., j] = x[..., j] * cos[..., j] + x[..., i] * signed_sin[..., j]
    return out
