"""Keeps what sampling must remember of one sequence (`SequenceState`), and computes the 64-bit keys of rows' sampling noise.

The state is a function of the sequence's parameters and token ids. So a sequence that continues after preemption, or on another
worker, samples the same tokens.

A key mixes seed, choice and output position by SplitMix64's finaliser in turn. `transom_kernels.sample.reference.gumbel` turns a
key and a token id into noise, which is the same on every device and in any batch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from transom_core.contract import SamplingParams
from transom_kernels.sample.reference import GOLDEN, MIX_1, MIX_2
from transom_worker.sampling.token_table import FixedPairs, TokenCounts, TokenPairs

MASK_64 = 2**64 - 1


def choice_key(seed: int, choice_index: int) -> int:
    """Return the unsigned key of a choice, from which the keys of all its output positions are made.

    Arguments may be any Python integers and count modulo 2**64.
    """
    return _mixed_with(_mixed_with(0, seed), choice_index)


def position_keys(choice_keys: ArrayLike, output_positions: ArrayLike) -> NDArray[np.int64]:
    """Return the signed 64-bit keys of many rows at once, from their choice keys."""
    keys = (np.array(choice_keys, dtype=np.uint64) ^ np.array(output_positions, dtype=np.uint64)) + np.uint64(GOLDEN)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return (keys ^ (keys >> np.uint64(31))).view(np.int64)


def _mixed_with(key: int, value: int) -> int:
    """Return the SplitMix64 finaliser of (key xor value) + GOLDEN; `position_keys` computes the same with numpy."""
    value = ((key ^ (value & MASK_64)) + GOLDEN) & MASK_64
    value = (value ^ (value >> 30)) * MIX_1 & MASK_64
    value = (value ^ (value >> 27)) * MIX_2 & MASK_64
    return value ^ (value >> 31)


def signed_key(value: int) -> int:
    """Return an unsigned 64-bit integer as the signed one with the same bits."""
    return value - 2**64 if value >= 2**63 else value


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
        self.counts = TokenCounts(token_ids, num_prompt_tokens, params) if self.has_penalties else None
        eos_ids = () if params.ignore_eos else eos_token_ids
        self.end_token_ids = sorted({*eos_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._bias: FixedPairs | None = None  # made at the first call of `bias_pairs`; so are `_bans`
        self._bans: FixedPairs | None = None
        self.has_filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Return whether earlier tokens change the logits."""
        params = self.params
        return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Return whether the next token's logits change before temperature and filters."""
        return bool(self.counts is not None or self.params.logit_bias or self.banned)

    @property
    def may_change_logits(self) -> bool:
        """Return whether `changes_logits` may be true of any token."""
        return bool(self.counts is not None or self.params.logit_bias or self.end_token_ids)

    @property
    def banned(self) -> list[int]:
        """Return the token ids that would end the sequence while its output is shorter than `min_tokens`, and [] afterwards."""
        return self.end_token_ids if self.output_position < self.params.min_tokens else []

    def bias_pairs(self, vocab_size: int) -> TokenPairs | None:
        """Return the tokens of the vocabulary that have a logit bias, with the bias; None if there is no bias."""
        if not self.params.logit_bias:
            return None
        if self._bias is None:
            bias = {token: value for token, value in self.params.logit_bias.items() if token < vocab_size}
            self._bias = _fixed(list(bias), list(bias.values()))
        return self._bias

    def banned_pairs(self, vocab_size: int) -> TokenPairs | None:
        """Return the tokens of the vocabulary that are `banned` now, each with the number 0; None if there are none."""
        if not self.banned:
            return None
        if self._bans is None:
            tokens = [token for token in self.end_token_ids if token < vocab_size]
            self._bans = _fixed(tokens, [0.0] * len(tokens))
        return self._bans

    @property
    def all_pairs(self) -> list[TokenPairs]:
        """Return all pairs of this sequence that a device may hold."""
        return [pairs for pairs in (self.counts, self._bias, self._bans) if pairs is not None]


def _fixed(token_ids: list[int], values: list[float]) -> FixedPairs:
    return FixedPairs(np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32))
