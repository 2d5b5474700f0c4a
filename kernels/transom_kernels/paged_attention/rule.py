"""Which keys a query sees: one rule for every path.

The query at position `p` sees key `k` when `k <= p` and either `k < S` (sink tokens) or `lower(p) <= k`, where `lower` is the
largest of `attend_from`, `p - W + 1` (window W, the query counted) and `p - p mod C` (chunk C).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRule:
    """A layer's mask; None or 0 switches a part off."""

    window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None

    def lower(self, position: int, attend_from: int) -> int:
        """First key, sinks aside, that the query at `position` sees; above `position` when it sees none."""
        low = attend_from
        if self.window is not None:
            low = max(low, position - self.window + 1)
        if self.chunk is not None:
            low = max(low, position - position % self.chunk)
        return low

    def lowers(self, positions: Integers, attend_from: Integers) -> Integers:
        """`lower` of many queries."""
        low = attend_from
        if self.window is not None:
            low = np.maximum(low, positions - self.window + 1)
        if self.chunk is not None:
            low = np.maximum(low, positions - positions % self.chunk)
        return low

    def visible(self, positions: torch.Tensor, keys: torch.Tensor, attend_from: int | torch.Tensor) -> torch.Tensor:
        """Mask [..., R, L] of queries at `positions` [..., R] over `keys` [..., L]; `attend_from` broadcasts over both."""
        p, k = positions[..., :, None], keys[..., None, :]
        seen = k >= attend_from
        if self.window is not None:
            seen = seen & (k > p - self.window)
        if self.chunk is not None:
            seen = seen & (k >= p - p % self.chunk)
        if self.num_sink_tokens:
            seen = seen | (k < self.num_sink_tokens)
        return seen & (k <= p)
