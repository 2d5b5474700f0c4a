"""Rotary tables of one step, shared by all layers.

Legend: T tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and sine (its first half negated) per token, [T, 1, D]."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


class RotaryEmbedding:
    """Half-split, default frequencies: computed in float32, then cast, as transformers does."""

    def __init__(self, *, head_size: int, theta: float, dtype: torch.dtype, device: torch.device) -> None:
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(device=device, dtype=torch.float32) / head_size
        frequency = 1.0 / (theta**exponents)
        self._frequency_D = torch.cat([frequency, frequency])
        self._sign_D = torch.tensor([-1.0] * (head_size // 2) + [1.0] * (head_size // 2), device=device)
        self._dtype = dtype

    def __call__(self, positions_T: torch.Tensor) -> RotaryTables:
        """Tables of these positions."""
        angles_TD = positions_T.to(torch.float32)[:, None] * self._frequency_D
        cos_TD, sin_TD = angles_TD.cos(), angles_TD.sin().mul_(self._sign_D)
        return RotaryTables(cos_TD.to(self._dtype)[:, None], sin_TD.to(self._dtype)[:, None])
