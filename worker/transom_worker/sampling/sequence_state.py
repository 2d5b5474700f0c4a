"""What sampling remembers of one sequence.

All of it is computed from the sequence's parameters and token ids, so a sequence that continues after preemption, or on another
worker, samples the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_worker.contract import SamplingParams
from transom_worker.sampling.noise import choice_key, position_keys
from transom_worker.sampling.penalties import TokenCounts


class SequenceState:
    """One sequence's sampling parameters, token counts and output position."""

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        seed: int,
        choice_index: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.params = params
        self.output_position = len(token_ids) - num_prompt_tokens
        self.choice_key = choice_key(seed, choice_index)
        self.counts = TokenCounts(token_ids, num_prompt_tokens) if self.has_penalties else None
        eos_ids = () if params.ignore_eos else eos_token_ids
        self.end_token_ids = sorted({*eos_ids, *params.stop_token_ids}) if params.min_tokens else []
        self.has_filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        params = self.params
        return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether the next token's logits change before temperature and filters."""
        return bool(self.counts is not None or self.params.logit_bias or self.banned)

    @property
    def banned(self) -> list[int]:
        """The token ids that would end the sequence, as long as its output is shorter than `min_tokens`; empty afterwards."""
        return self.end_token_ids if self.output_position < self.params.min_tokens else []

    def append(self, token_id: int) -> None:
        """Add one output token."""
        self.output_position += 1
        if self.counts is not None:
            self.counts.append(token_id)


def noise_keys(states: Sequence[SequenceState]) -> NDArray[np.int64]:
    """Return the noise key of each sequence's next token, int64 [S]."""
    return position_keys([state.choice_key for state in states], [state.output_position for state in states])
