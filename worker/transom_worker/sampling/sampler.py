"""Samples the next token of every sequence of a step from its logits. A row's result does not depend on other rows.

On CPUs a kernel reads the parameters from records of the sequences (`record_sampling`); on other devices the operator `sample` gets
them as tensors (`sample_fused`). `transom_kernels.sample.reference` defines what both compute.

Legend: S rows that are sampled, L rows that request log-probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.contract import SamplingParams, TokenLogprobs
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.sample import SampleParams, sample
from transom_worker.sampling.adjustments import Adjustments, HeldRows, changeable
from transom_worker.sampling.logprobs import token_logprobs
from transom_worker.sampling.sequence_state import SequenceState, position_keys
from transom_worker.sampling.token_table import RowPairs
from transom_worker.uploads import Arrays, Uploads, uploads_to

if TYPE_CHECKING:
    from transom_worker.sampling.record_sampling import RecordSampler

# The most uploads of one step: parameters, changed rows, bias, bans, grammars and penalties; with several ranks also the parameters
# of local rows.
UPLOADS_PER_STEP = 7


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """One step's tokens, and the log-probabilities of rows that request them; `logprobs` is empty if no row does."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class _Rows:
    """The sequences of a step, kept because most decode steps have the same ones as the step before.

    `logprob_rows` are the rows that request log-probabilities, and `changing` those whose logits some step may change.
    """

    def __init__(self, seq_ids: Sequence[int], states: list[SequenceState]) -> None:
        self.seq_ids, self.states = list(seq_ids), states
        self.logprob_rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        self.changing = [row for row, state in enumerate(states) if state.may_change_logits]

    def arrays(self) -> Arrays:
        """Return the arrays of `sample_fused`."""
        positions = [state.output_position for state in self.states]
        return {"keys": position_keys(self._choice_keys, positions), **self._fixed}

    @cached_property
    def _choice_keys(self) -> NDArray[np.uint64]:
        return np.array([state.choice_key for state in self.states], dtype=np.uint64)

    @cached_property
    def _fixed(self) -> Arrays:
        """The sampling parameters that no step changes, by the field names of `SampleParams`."""
        params = [state.params for state in self.states]
        return {
            "temperature": np.array([0.0 if p.greedy else p.temperature for p in params], dtype=np.float32),
            "top_p": np.array([p.top_p for p in params], dtype=np.float32),
            "min_p": np.array([p.min_p for p in params], dtype=np.float32),
            "top_k": np.array([min(max(0, p.top_k), MAX_TOP_K) for p in params], dtype=np.int32),
        }


class Sampler:
    """Keeps the sampling state of every running sequence, and samples their next tokens."""

    def __init__(self, *, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, SequenceState] = {}
        self._rows = _Rows([], [])
        self._adjustments = Adjustments()
        self._uploads: Uploads | None = None  # to the device of the logits
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
        """Add or replace a sequence; `token_ids` are its prompt and its output so far."""
        self.remove(seq_id)
        self._states[seq_id] = SequenceState(
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            seed=seed,
            choice_index=choice_index,
            eos_token_ids=self._eos_token_ids,
        )

    def append(self, seq_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Add one output token to each sequence. If `needs_tokens` is false, it may be negative: only the device knows it."""
        for seq_id, token_id in zip(seq_ids, token_ids, strict=True):
            state = self._states[seq_id]
            state.output_position += 1
            if state.counts is not None:
                assert token_id >= 0
                state.counts.append(token_id)

    def needs_tokens(self, seq_id: int) -> bool:
        """Return whether sampling a sequence's next token needs its earlier tokens, which is so if the sequence has penalties."""
        return self._states[seq_id].has_penalties

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._adjustments.remove(state)
        self._rows = _Rows([], [])
        if self._record_sampler is not None:
            self._record_sampler.remove(seq_id)

    def sample(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> SamplerOutput:
        """Return the next token of each sequence, row by row. `logits_SV` is not changed."""
        if not seq_ids:
            return SamplerOutput(token_ids=[])
        rows = self._rows_of(seq_ids)
        token_ids: list[int] = self._token_ids(logits_SV, rows, grammar_mask).tolist()
        logprobs = _logprobs(logits_SV, rows, token_ids) if rows.logprob_rows else []
        return SamplerOutput(token_ids=token_ids, logprobs=logprobs)

    def launch(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> torch.Tensor | None:
        """Return the next tokens on the device, int64 [S], without waiting for them; None if a row requests log-probabilities,
        for which the host needs the tokens."""
        rows = self._rows_of(seq_ids)
        return None if rows.logprob_rows else self._token_ids(logits_SV, rows, grammar_mask)

    def _rows_of(self, seq_ids: Sequence[int]) -> _Rows:
        if self._rows.seq_ids != seq_ids:
            self._rows = _Rows(seq_ids, [self._states[seq_id] for seq_id in seq_ids])
        return self._rows

    def _token_ids(self, logits_SV: torch.Tensor, rows: _Rows, grammar_mask: bytes | None) -> torch.Tensor:
        states = rows.states
        if uses_cpu_kernels(logits_SV):
            return self._records.sample(logits_SV, rows.seq_ids, states, grammar_mask=grammar_mask)
        uploads, held = self._uploads_to(logits_SV.device), HeldRows(grammar_mask, len(states))
        changed = sorted({row for row in rows.changing if states[row].changes_logits}.union(held.rows))
        if not changed:
            return sample_fused(logits_SV, rows.arrays(), None, uploads)
        with changeable(logits_SV, changed, uploads) as adjusted_SV:
            self._adjustments.apply_bias_and_bans(adjusted_SV, states, held, uploads)
            return sample_fused(adjusted_SV, rows.arrays(), self._adjustments.penalties(states, uploads), uploads)

    def _uploads_to(self, device: torch.device) -> Uploads:
        if self._uploads is None:
            self._uploads = uploads_to(device, per_step=UPLOADS_PER_STEP)
        return self._uploads

    @property
    def _records(self) -> RecordSampler:
        if self._record_sampler is None:
            from transom_worker.sampling.record_sampling import RecordSampler

            self._record_sampler = RecordSampler()
        return self._record_sampler


def _logprobs(logits_SV: torch.Tensor, rows: _Rows, chosen: list[int]) -> list[TokenLogprobs | None]:
    num_top = [rows.states[row].params.logprobs or 0 for row in rows.logprob_rows]
    logits_LV = take_rows(logits_SV, rows.logprob_rows)
    found = token_logprobs(logits_LV, [chosen[row] for row in rows.logprob_rows], num_top)
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    for row, logprobs in zip(rows.logprob_rows, found, strict=True):
        result[row] = logprobs
    return result


def take_rows(values_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the rows with these ascending numbers, as a view if the numbers are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return values_RV[rows[0] : rows[-1] + 1]
    return values_RV[_on(values_RV.device, rows)]


def put_rows(values_R: torch.Tensor, rows: Sequence[int], values_N: torch.Tensor) -> None:
    """Write values to the rows with these ascending numbers, in one copy if the numbers are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        values_R[rows[0] : rows[-1] + 1] = values_N
    else:
        values_R[_on(values_R.device, rows)] = values_N


def _on(device: torch.device, rows: Sequence[int]) -> torch.Tensor:
    """Copy row numbers to a device without waiting for the work that was launched there before."""
    return torch.tensor(rows).to(device, non_blocking=True)


MAX_TOP_K = 2**31 - 1  # larger than any vocabulary, so larger requests can be cut to it


def sample_fused(logits_SV: torch.Tensor, arrays: Arrays, penalties: RowPairs | None, uploads: Uploads) -> torch.Tensor:
    """Return the token of each row, int64 [S], on the device; `arrays` are those of the rows (`_Rows.arrays`).

    The logits must already contain bias and bans, but not `penalties`: this call writes those into the logits.
    """
    rows: dict[str, Any] = uploads.tensors(arrays)
    if penalties is None:
        return sample(logits_SV, SampleParams(**rows))
    changes = SampleParams(
        **rows,
        change_row=penalties.row,
        change_id=penalties.token,
        change_factor=penalties.row_value,
        change_minus=penalties.value,
    )
    return sample(logits_SV, changes)
