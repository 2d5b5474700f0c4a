"""Rotary tables of one step, shared by all layers.

Legend: T tokens, H rotated heads, KVH KV heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and signed sine per token for the heads of a fused q, k, v row: [T, H + 2 KVH, D]; values pass through."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


class RotaryEmbedding:
    """Half-split, default frequencies: computed in float32, then cast, as transformers does."""

    def __init__(
        self,
        *,
        head_size: int,
        theta: float,
        num_rotated: int,
        num_passed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(device=device, dtype=torch.float32) / head_size
        self._inverse_frequency = 1.0 / (theta**exponents)
        self._sign = torch.tensor([-1.0] * (head_size // 2) + [1.0] * (head_size // 2), device=device)
        self._num_rotated, self._num_passed, self._dtype = num_rotated, num_passed, dtype

    def __call__(self, positions_T: torch.Tensor) -> RotaryTables:
        """Tables of these positions."""
        angles = positions_T.to(torch.float32)[:, None] * self._inverse_frequency
        angles = torch.cat([angles, angles], dim=-1)
        return RotaryTables(self._widen(angles.cos(), 1.0), self._widen(angles.sin() * self._sign, 0.0))

    def _widen(self, table_TD: torch.Tensor, passed: float) -> torch.Tensor:
        """The same row for every rotated head, `passed` for the others."""
        tokens, size = table_TD.shape
        wide = torch.full(
            (tokens, self._num_rotated + self._num_passed, size), passed, dtype=self._dtype, device=table_TD.device
        )
        wide[:, : self._num_rotated] = table_TD[:, None].to(self._dtype)
        return wide
