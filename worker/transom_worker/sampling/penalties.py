"""Counts a sequence's tokens for repetition, presence and frequency penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_core.contract import SamplingParams

SPARE = 64  # array elements that are kept free for new tokens


class TokenCounts:
    """The penalised tokens of a sequence, and how often each occurs in its output. Implements `TokenPairs` for a `TokenTable`.

    Only the repetition penalty applies to prompt tokens; without it the prompt is not read. A pair is a token and the number that
    presence and frequency penalties subtract from its logit.
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
        # Slots changed since the last `take_changed`; None before its first call.
        self._changed: list[int] | None = None

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
        """Return the tokens, each once, how often each occurs in the output, and how many elements of both arrays are in use.

        Later calls return the same arrays, until they are full.
        """
        return self._ids, self._counts, len(self._slot)

    def take_changed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Return the slots of the tokens counted since the last call, the tokens, and what is subtracted from their logits.

        The first call returns all tokens.
        """
        changed = range(len(self)) if self._changed is None else dict.fromkeys(self._changed)
        self._changed = []
        slots = np.fromiter(changed, np.int64, len(changed))
        counts = self._counts[slots]
        minus = self._presence * (counts > 0) + self._frequency * counts.astype(np.float32)
        return slots, self._ids[slots], minus.astype(np.float32)
