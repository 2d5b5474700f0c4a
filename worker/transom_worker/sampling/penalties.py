"""Repetition, presence and frequency penalties over counts that grow with a sequence.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray


class TokenCounts:
    """Which tokens a sequence holds (prompt and output) and how often each is in its output."""

    def __init__(self, token_ids: Iterable[int], num_prompt_tokens: int) -> None:
        self._slot: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)
        for position, token_id in enumerate(token_ids):
            self._add(token_id, is_output=position >= num_prompt_tokens)

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        self._add(token_id, is_output=True)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Each token of the sequence once."""
        return self._ids[: len(self._slot)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often each of `token_ids` is in the output."""
        return self._counts[: len(self._slot)]

    def _add(self, token_id: int, *, is_output: bool) -> None:
        slot = self._slot.setdefault(token_id, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += is_output


def apply_penalties(
    logits_RV: torch.Tensor,
    rows: list[int],
    counts: list[TokenCounts],
    repetition: list[float],
    presence: list[float],
    frequency: list[float],
) -> None:
    """Penalise in place the rows named by `rows`, each by its own counts and strengths.

    Repetition divides positive and multiplies negative logits of every token seen in prompt or output; then presence and
    frequency are subtracted for tokens of the output, frequency once per occurrence.
    """
    lengths = [len(count.token_ids) for count in counts]
    device = logits_RV.device
    row = torch.from_numpy(np.repeat(np.array(rows, dtype=np.int64), lengths)).to(device)
    token = torch.from_numpy(np.concatenate([count.token_ids for count in counts])).to(device)
    occurrences = np.concatenate([count.output_counts for count in counts])
    factor = torch.from_numpy(np.repeat(np.array(repetition, dtype=np.float32), lengths)).to(device)
    subtract = np.repeat(np.array(presence, dtype=np.float32), lengths) * (occurrences > 0)
    subtract += np.repeat(np.array(frequency, dtype=np.float32), lengths) * occurrences.astype(np.float32)
    values = logits_RV[row, token]
    values = torch.where(values < 0, values * factor, values / factor)
    logits_RV[row, token] = values - torch.from_numpy(subtract).to(device)
