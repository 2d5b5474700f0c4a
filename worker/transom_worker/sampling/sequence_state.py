"""What sampling remembers of one sequence; all of it follows from its token ids, so a resumed sequence starts the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_worker.contract import SamplingParams
from transom_worker.sampling.noise import choice_key, position_keys
from transom_worker.sampling.penalties import TokenCounts


class SequenceState:
    """Parameters of one sequence, with the counts and the output position that grow with it."""

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
        ends = () if params.ignore_eos else eos_token_ids
        self._enders = sorted({*ends, *params.stop_token_ids}) if params.min_tokens else []
        self.has_filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        params = self.params
        return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether the next token's logits need more than temperature and filters."""
        return bool(self.counts is not None or self.params.logit_bias or self.banned)

    @property
    def banned(self) -> list[int]:
        """Tokens that may not come yet: those that would end the sequence before `min_tokens`."""
        return self._enders if self.output_position < self.params.min_tokens else []

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.output_position += 1
        if self.counts is not None:
            self.counts.append(token_id)


def noise_keys(states: Sequence[SequenceState]) -> NDArray[np.int64]:
    """The keys of each row's noise for its next token."""
    return position_keys([state.choice_key for state in states], [state.output_position for state in states])
