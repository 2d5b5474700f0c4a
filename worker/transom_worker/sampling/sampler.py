"""Samples the next token of every sequence of a step from its logits. A row's result does not depend on other rows.

- greedy row: the most likely token wins; no noise is added.
- filtered row: Gumbel noise is added to the candidates that top_k, top_p and min_p leave.
- unfiltered row: Gumbel noise is added to the whole row.

Legend: S rows that are sampled, N some of these rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from transom_core.contract import SamplingParams, TokenLogprobs
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_worker.sampling.adjustments import Adjustments
from transom_worker.sampling.filters import Filters, filter_logits
from transom_worker.sampling.fused_sampling import sample_fused
from transom_worker.sampling.gumbel_max import gumbel_argmax
from transom_worker.sampling.logprobs import token_logprobs
from transom_worker.sampling.noise import gumbel
from transom_worker.sampling.row_ops import first_argmax, take_rows
from transom_worker.sampling.sequence_state import SequenceState, apply_temperature, noise_key_tensor

if TYPE_CHECKING:
    from transom_worker.sampling.record_sampling import RecordSampler


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """One step's tokens, and log-probabilities where a row asks for them; `logprobs` is empty where no row does."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The sequences of a step. Most decode steps have those of the step before."""

    seq_ids: Sequence[int]
    states: list[SequenceState]
    logprob_rows: list[int]  # rows that ask for log-probabilities


class Sampler:
    """Keeps the sampling state of every running sequence, and samples their next tokens."""

    def __init__(self, *, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, SequenceState] = {}
        self._rows = _Rows([], [], [])
        self._adjustments = Adjustments()
        self._record_sampler: RecordSampler | None = None

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
        """Add a sequence, or replace it, with its prompt and the output so far."""
        self.remove(seq_id)
        self._states[seq_id] = SequenceState(
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            seed=seed,
            choice_index=choice_index,
            eos_token_ids=self._eos_token_ids,
        )

    def append(self, seq_id: int, token_id: int) -> None:
        """Add one output token to a sequence."""
        self._states[seq_id].append(token_id)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._adjustments.remove(state)
        self._rows = _Rows([], [], [])
        if self._record_sampler is not None:
            self._record_sampler.remove(seq_id)

    def sample(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> SamplerOutput:
        """Return the next token of each sequence, row by row. `logits_SV` is not changed."""
        if not seq_ids:
            return SamplerOutput(token_ids=[])
        if self._rows.seq_ids != seq_ids:
            states = [self._states[seq_id] for seq_id in seq_ids]
            logprob_rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
            self._rows = _Rows(list(seq_ids), states, logprob_rows)
        token_ids = self._token_ids(logits_SV, self._rows, grammar_mask)
        logprobs = _logprobs(logits_SV, self._rows, token_ids) if self._rows.logprob_rows else []
        return SamplerOutput(token_ids=token_ids, logprobs=logprobs)

    def _token_ids(self, logits_SV: torch.Tensor, rows: _Rows, grammar_mask: bytes | None) -> list[int]:
        states = rows.states
        if self._uses_records(logits_SV):
            ids: list[int] = self._records.sample(logits_SV, rows.seq_ids, states, grammar_mask=grammar_mask).tolist()
            return ids
        is_fused = uses_triton(logits_SV)
        adjusted_SV = logits_SV
        if grammar_mask is not None or any(state.changes_logits for state in states):
            adjusted_SV = logits_SV.clone()
            apply = self._adjustments.apply_bias_and_bans if is_fused else self._adjustments.apply
            apply(adjusted_SV, states, grammar_mask)
        if is_fused:
            return sample_fused(adjusted_SV, states, self._adjustments.penalties(states, logits_SV.device))
        return _sample_rows(adjusted_SV, states)

    def _uses_records(self, logits_SV: torch.Tensor) -> bool:
        """Whether the CPU kernel samples these logits."""
        return uses_cpu_kernels(logits_SV) and logits_SV.dtype == torch.float32 and logits_SV.stride(1) == 1

    @property
    def _records(self) -> RecordSampler:
        if self._record_sampler is None:
            from transom_worker.sampling.record_sampling import RecordSampler

            self._record_sampler = RecordSampler()
        return self._record_sampler


def _sample_rows(logits_SV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    greedy = [row for row, state in enumerate(states) if state.params.greedy]
    if len(greedy) == len(states):
        return _sample_greedy(logits_SV)
    filtered = [row for row, state in enumerate(states) if not state.params.greedy and state.has_filters]
    unfiltered = [row for row, state in enumerate(states) if not state.params.greedy and not state.has_filters]
    chosen = [0] * len(states)
    for rows, choose in ((greedy, None), (filtered, _sample_filtered), (unfiltered, _sample_unfiltered)):
        if not rows:
            continue
        part = take_rows(logits_SV, rows)
        tokens = choose(part, [states[row] for row in rows]) if choose else _sample_greedy(part)
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def _sample_greedy(logits_NV: torch.Tensor) -> list[int]:
    return first_argmax(logits_NV).tolist()


def _sample_filtered(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    filters = Filters(
        top_k=[state.params.top_k for state in states],
        top_p=[state.params.top_p for state in states],
        min_p=[state.params.min_p for state in states],
    )
    candidates = filter_logits(apply_temperature(logits_NV, states), filters)
    noise_NC = gumbel(noise_key_tensor(logits_NV, states), candidates.token_ids_RC)
    best_N1 = first_argmax(noise_NC.add_(candidates.logits_RC))[:, None]
    return candidates.token_ids_RC.gather(1, best_N1)[:, 0].tolist()


def _sample_unfiltered(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    _, token_ids_N = gumbel_argmax(apply_temperature(logits_NV, states), noise_key_tensor(logits_NV, states))
    return token_ids_N.tolist()


def _logprobs(logits_SV: torch.Tensor, rows: _Rows, chosen: list[int]) -> list[TokenLogprobs | None]:
    num_top = [rows.states[row].params.logprobs or 0 for row in rows.logprob_rows]
    logits_LV = take_rows(logits_SV, rows.logprob_rows)
    found = token_logprobs(logits_LV, [chosen[row] for row in rows.logprob_rows], num_top)
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    for row, logprobs in zip(rows.logprob_rows, found, strict=True):
        result[row] = logprobs
    return result
