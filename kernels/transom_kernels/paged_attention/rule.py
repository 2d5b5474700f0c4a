"""The attention mask: which keys a query sees. Every implementation of `paged_attention` follows this one rule.

The query at position `p` sees key `k` when `k <= p` (causal) and either `k < S` (S sink tokens) or `first_key(p) <= k`, where
`first_key` is the largest of

- `attend_from`, the first position whose key is in the cache (above 0 only while the engine recomputes a window that was evicted);
- `p - W + 1` with a sliding window of W tokens, the query counted;
- `p - p mod C` with attention chunks of C tokens (Llama 4: a query sees its own chunk only).

Example, the query at position 10 with W = 4 and S = 2 ('x': seen):

    key   0  1  2  3  4  5  6  7  8  9 10
          x  x  .  .  .  .  .  x  x  x  x
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRule:
    """A layer's mask; None switches a constraint off.

    Raises:
        ValueError: a window or a chunk is not above 0, or the number of sink tokens is below 0.
    """

    window: int | None = None  # tokens, the query counted
    num_sink_tokens: int = 0
    chunk: int | None = None  # tokens of an attention chunk; unrelated to chunked prefill

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0, or None.")
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens is {self.num_sink_tokens}; it must be 0 or more.")

    def first_key(self, position: int, attend_from: int) -> int:
        """Return the first key that the query at `position` sees, sink tokens aside; above `position` if it sees none."""
        low = attend_from
        if self.window is not None:
            low = max(low, position - self.window + 1)
        if self.chunk is not None:
            low = max(low, position - position % self.chunk)
        return low

    def first_keys(self, positions: Integers, attend_from: Integers) -> Integers:
        """Return `first_key` of many queries at once."""
        low = attend_from
        if self.window is not None:
            low = np.maximum(low, positions - self.window + 1)
        if self.chunk is not None:
            low = np.maximum(low, positions - positions % self.chunk)
        return low

    def key_ranges(self, start: int, end: int, attend_from: int) -> tuple[int, int]:
        """Return (sinks_end, low): queries at positions [start, end) together read the keys [0, sinks_end) and [low, end)."""
        low = min(self.first_key(start, attend_from), end)
        return min(self.num_sink_tokens, low), low

    def visible(self, positions: torch.Tensor, keys: torch.Tensor, attend_from: int | torch.Tensor) -> torch.Tensor:
        """Return the mask [..., R, L] of R queries at `positions` [..., R] over L `keys` [..., L]; `attend_from` broadcasts."""
        p, k = positions[..., :, None], keys[..., None, :]
        seen = k >= attend_from
        if self.window is not None:
            seen = seen & (k > p - self.window)
        if self.chunk is not None:
            seen = seen & (k >= p - p % self.chunk)
        if self.num_sink_tokens:
            seen = seen | (k < self.num_sink_tokens)
        return seen & (k <= p)
