"""Logits to tokens, for every sampling row of a step; no row's result depends on another row.

Legend: S rows that sample, N rows of them that take noise, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from transom_kernels.launch import uses_triton
from transom_worker.contract import SamplingParams, TokenLogprobs
from transom_worker.sampling.adjustments import adjust_logits, apply_bias_and_bans
from transom_worker.sampling.filters import Filters, filter_logits
from transom_worker.sampling.fused_sampling import sample_fused
from transom_worker.sampling.gumbel_max import gumbel_argmax
from transom_worker.sampling.logprobs import token_logprobs
from transom_worker.sampling.noise import gumbel
from transom_worker.sampling.row_ops import first_argmax, take_rows
from transom_worker.sampling.sequence_state import SequenceState
from transom_worker.sampling.temperature import apply_temperature, noise_keys


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """One step's tokens, and log-probabilities where asked for; `logprobs` is empty when no row asked."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class Sampler:
    """Keeps the sampling state of every running sequence and chooses their next tokens."""

    def __init__(self, *, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, SequenceState] = {}

    def add(
        self,
        seq_id: int,
        *,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        seed: int,
        choice_index: int = 0,
    ) -> None:
        """Start (or start again) a sequence from its prompt and the output known so far."""
        self._states[seq_id] = SequenceState(
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            seed=seed,
            choice_index=choice_index,
            eos_token_ids=self._eos_token_ids,
        )

    def append(self, seq_id: int, token_id: int) -> None:
        """One more output token of a sequence became known."""
        self._states[seq_id].append(token_id)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        self._states.pop(seq_id, None)

    def sample(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> SamplerOutput:
        """The next token of each sequence, row by row. `logits_SV` is left as it is."""
        if not seq_ids:
            return SamplerOutput(token_ids=[])
        states = [self._states[seq_id] for seq_id in seq_ids]
        at_once = uses_triton(logits_SV)
        adjusted_SV = logits_SV
        if grammar_mask is not None or any(state.changes_logits for state in states):
            adjusted_SV = logits_SV.clone()
            (apply_bias_and_bans if at_once else adjust_logits)(adjusted_SV, states, grammar_mask)
        token_ids = (sample_fused if at_once else _choose)(adjusted_SV, states)
        return SamplerOutput(token_ids=token_ids, logprobs=_logprobs(logits_SV, states, token_ids))


def _choose(logits_SV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    greedy = [row for row, state in enumerate(states) if state.params.greedy]
    if len(greedy) == len(states):
        return _most_likely(logits_SV)
    filtered = [row for row, state in enumerate(states) if not state.params.greedy and state.has_filters]
    noisy = [row for row, state in enumerate(states) if not state.params.greedy and not state.has_filters]
    chosen = [0] * len(states)
    for rows, choose in ((greedy, None), (filtered, _filtered), (noisy, _unfiltered)):
        if not rows:
            continue
        part = take_rows(logits_SV, rows)
        tokens = choose(part, [states[row] for row in rows]) if choose else _most_likely(part)
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def _most_likely(logits_NV: torch.Tensor) -> list[int]:
    return first_argmax(logits_NV).tolist()


def _filtered(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    filters = Filters(
        top_k=[state.params.top_k for state in states],
        top_p=[state.params.top_p for state in states],
        min_p=[state.params.min_p for state in states],
    )
    candidates = filter_logits(apply_temperature(logits_NV, states), filters)
    noise_NC = gumbel(noise_keys(logits_NV, states), candidates.token_ids_RC)
    best_N1 = first_argmax(noise_NC.add_(candidates.logits_RC))[:, None]
    return candidates.token_ids_RC.gather(1, best_N1)[:, 0].tolist()


def _unfiltered(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    _, token_ids_N = gumbel_argmax(apply_temperature(logits_NV, states), noise_keys(logits_NV, states))
    return token_ids_N.tolist()


def _logprobs(
    logits_SV: torch.Tensor, states: Sequence[SequenceState], chosen: list[int]
) -> list[TokenLogprobs | None]:
    wanted = [(row, k) for row, state in enumerate(states) if (k := state.params.logprobs) is not None]
    if not wanted:
        return []
    rows = [row for row, _ in wanted]
    found = token_logprobs(take_rows(logits_SV, rows), [chosen[row] for row in rows], [k for _, k in wanted])
    result: list[TokenLogprobs | None] = [None] * len(states)
    for row, logprobs in zip(rows, found, strict=True):
        result[row] = logprobs
    return result
