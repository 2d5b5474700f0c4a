"""The arguments that `latent_attention` passes to its implementations, and the check that they fit together.

Legend: T queries, H heads, D latent width, W rows of the window, K entries of a query, P rows per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentInputs:
    """Queries, and the slots of the rows that each of them sees; a negative slot names no row."""

    q: torch.Tensor  # [T, H, D]
    window_cache: torch.Tensor  # [ids, P, 1, D], of q's dtype; any strides
    window_slots: torch.Tensor  # [T, W] int64
    entry_cache: torch.Tensor | None  # [ids, P, 1, D]
    entry_slots: torch.Tensor | None  # [T, K] int64
    sink_logits: torch.Tensor  # [H] float32
    scale: float

    @property
    def places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The cache and slots of the window, then those of the entries if there are any."""
        window = (self.window_cache, self.window_slots)
        if self.entry_cache is None or self.entry_slots is None:
            return [window]
        return [window, (self.entry_cache, self.entry_slots)]

    def check(self) -> None:
        """Raise ValueError for tensors that do not fit together."""
        q, sinks = self.q, self.sink_logits
        if (self.entry_cache is None) != (self.entry_slots is None):
            raise ValueError("entry_cache and entry_slots belong together: give both or neither.")
        for cache, slots in self.places:
            if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != q.shape[2] or cache.dtype != q.dtype:
                raise ValueError(
                    f"q {tuple(q.shape)} {q.dtype} does not fit a cache {tuple(cache.shape)} {cache.dtype}: one head of q's "
                    "width and dtype is read."
                )
            if slots.dim() != 2 or len(slots) != len(q):
                raise ValueError(
                    f"slots {tuple(slots.shape)} do not fit {len(q)} queries: give a row of them for each."
                )
        if sinks.shape != (q.shape[1],) or sinks.dtype != torch.float32:
            raise ValueError(
                f"sink_logits {tuple(sinks.shape)} {sinks.dtype}: give one float32 for each of {q.shape[1]} heads."
            )
