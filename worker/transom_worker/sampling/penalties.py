"""Repetition, presence and frequency penalties, from token counts that grow with a sequence.

Legend: R rows, V vocabulary, C logits that penalties change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

ROW_MULTIPLE = 4  # arrays of changes are padded to a multiple, so that each begins at a multiple of 16 bytes


class TokenCounts:
    """Which tokens a sequence holds (prompt and output), and how often each is in its output."""

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

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """The arrays that `token_ids` and `output_counts` are the beginnings of, and how many of their numbers are in use.

        They stay the same arrays until they are full.
        """
        return self._ids, self._counts, len(self._slot)

    def _add(self, token_id: int, *, is_output: bool) -> None:
        slot = self._slot.setdefault(token_id, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += is_output


@dataclass(frozen=True, slots=True)
class PenaltyChanges:
    """The logits that penalties change, each pair of row and token once.

    A logit is divided by `factor` if it is positive and multiplied by it if it is negative; then `minus` is subtracted.
    """

    row: torch.Tensor  # [C] int64
    token: torch.Tensor  # [C] int64
    factor: torch.Tensor  # [C] float32
    minus: torch.Tensor  # [C] float32


def penalty_changes(
    rows: list[int],
    counts: list[TokenCounts],
    repetition: list[float],
    presence: list[float],
    frequency: list[float],
    device: torch.device,
) -> PenaltyChanges:
    """Return the changes of the rows numbered `rows`; the other arguments have one element for each of them.

    The repetition penalty is for every token in prompt or output. Presence and frequency penalties are subtracted for tokens of
    the output, the frequency penalty once for each occurrence.
    """
    lengths = [len(count.token_ids) for count in counts]
    occurrences = np.concatenate([count.output_counts for count in counts])
    minus = np.repeat(np.array(presence, dtype=np.float32), lengths) * (occurrences > 0)
    minus += np.repeat(np.array(frequency, dtype=np.float32), lengths) * occurrences.astype(np.float32)
    num_changes = len(occurrences)
    width = max(1, -(-num_changes // ROW_MULTIPLE)) * ROW_MULTIPLE
    words = np.zeros(3 * width, dtype=np.int64)  # rows, tokens, then two arrays of half the size, in one copy
    floats = words[2 * width :].view(np.float32).reshape(2, width)
    words[:num_changes] = np.repeat(np.array(rows, dtype=np.int64), lengths)
    words[width : width + num_changes] = np.concatenate([count.token_ids for count in counts])
    floats[0, :num_changes] = np.repeat(np.array(repetition, dtype=np.float32), lengths)
    floats[1, :num_changes] = minus
    device_words = torch.from_numpy(words).to(device, non_blocking=True)
    factor, subtracted = device_words[2 * width :].view(torch.float32).view(2, width)[:, :num_changes]
    return PenaltyChanges(device_words[:num_changes], device_words[width : width + num_changes], factor, subtracted)


def apply_changes(logits_RV: torch.Tensor, changes: PenaltyChanges) -> None:
    """Apply the changes to the logits in place."""
    values = logits_RV[changes.row, changes.token]
    values = torch.where(values < 0, values * changes.factor, values / changes.factor)
    logits_RV[changes.row, changes.token] = values - changes.minus
