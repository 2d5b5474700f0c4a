"""Repetition, presence and frequency penalties, from token counts that grow with a sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_core.contract import SamplingParams

SPARE = 64  # places that are kept free for new tokens


class TokenCounts:
    """Which tokens of a sequence (prompt and output) have penalties, and how often each is in its output.

    Presence and frequency penalties are for tokens of the output. So without a repetition penalty the prompt is not looked at. For
    a `TokenTable` the sequence's pairs are a token and what is subtracted from its logit.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int, params: SamplingParams) -> None:
        output = token_ids[num_prompt_tokens:]
        unique = dict.fromkeys(token_ids if params.repetition_penalty != 1.0 else output)
        self._slot: dict[int, int] = {token_id: slot for slot, token_id in enumerate(unique)}
        self._ids = np.empty(len(unique) + SPARE, dtype=np.int64)
        self._ids[: len(unique)] = list(unique)
        self._counts = np.zeros_like(self._ids)
        for token_id, count in Counter(output).items():
            self._counts[self._slot[token_id]] = count
        self._presence, self._frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        self._changed: list[int] | None = None  # slots; None: no table has the pairs

    def __len__(self) -> int:
        return len(self._slot)

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        slot = self._slot.setdefault(token_id, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1
        if self._changed is not None:
            self._changed.append(slot)

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Each token once, how often it is in the output, and how many numbers of both arrays are in use.

        They stay the same arrays until they are full.
        """
        return self._ids, self._counts, len(self._slot)

    def take_changed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Slots of the tokens that were counted since the last call, the tokens, and what is subtracted from their logits."""
        changed = range(len(self)) if self._changed is None else dict.fromkeys(self._changed)
        self._changed = []
        slots = np.fromiter(changed, np.int64, len(changed))
        counts = self._counts[slots]
        minus = self._presence * (counts > 0) + self._frequency * counts.astype(np.float32)
        return slots, self._ids[slots], minus.astype(np.float32)
