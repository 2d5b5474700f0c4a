"""Half-split rotation, half by half: the specification of `rotary_`."""

from __future__ import annotations

import torch


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """See `op.rotary_`; returns the rotated copy."""
    first, second = x.chunk(2, dim=-1)
    cos_first, cos_second = cos.chunk(2, dim=-1)
    sin_first, sin_second = signed_sin.chunk(2, dim=-1)
    return torch.cat([first * cos_first + second * sin_first, second * cos_second + first * sin_second], dim=-1)
