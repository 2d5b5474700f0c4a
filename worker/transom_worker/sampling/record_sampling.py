"""Samples all rows with the CPU kernel, which reads each sequence's parameters from a record.

A record is an entry of the kernel's `SampleTable`. It is written once, when a sequence is first sampled; later steps update its
output position and token counts. Most decode steps have the same sequences as the step before, so the list of their records is kept
for the next step (`_Batch`).

Legend: S rows that are sampled, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transom_kernels.sample.cpu import sample_records
from transom_kernels.sample.table import Adjustments, SampleTable
from transom_worker.sampling.adjustments import check_mask
from transom_worker.sampling.sequence_state import SequenceState, signed_key
from transom_worker.sampling.token_table import TokenCounts


@dataclass(slots=True)
class _Batch:
    """The sequences of a step, and their records."""

    states: Sequence[SequenceState]
    numbers: list[int]  # the records' numbers
    numbers_S: torch.Tensor
    penalised: list[tuple[int, TokenCounts]]  # (record's number, token counts) of the sequences with penalties


class RecordSampler:
    """Owns the records of the sequences, and samples their next tokens."""

    def __init__(self) -> None:
        self._table = SampleTable()
        self._numbers: dict[int, int] = {}
        self._batch: _Batch | None = None

    def remove(self, seq_id: int) -> None:
        """Free a sequence's record; unknown ids are ignored."""
        number = self._numbers.pop(seq_id, None)
        if number is not None:
            self._table.remove(number)
            self._batch = None

    def sample(
        self,
        logits_SV: torch.Tensor,
        seq_ids: Sequence[int],
        states: Sequence[SequenceState],
        *,
        grammar_mask: bytes | None = None,
        first_id: int = 0,
        scores_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the token of each row, int64 [S], without changing the logits.

        `states` are the sequences' own; the sampler keeps the list, so the caller must not change it later. Column v of the logits
        is token id `first_id` + v. The tokens' scores are written to `scores_S` (float64).

        Raises:
            ValueError: the grammar mask has the wrong length.
        """
        batch = self._batch
        if batch is None or batch.states != states:
            batch = self._batch = self._new_batch(seq_ids, states)
        for number, state in zip(batch.numbers, states, strict=True):
            self._table.set_position(number, state.output_position)
        for number, counts in batch.penalised:
            self._table.set_counts(number, *counts.arrays)
        allowed = None
        if grammar_mask is not None:
            check_mask(grammar_mask, logits_SV)
            allowed = torch.from_numpy(np.frombuffer(grammar_mask, dtype=np.uint8).copy())
        return sample_records(
            logits_SV, self._table, batch.numbers_S, allowed=allowed, first_id=first_id, scores=scores_S
        )

    def _new_batch(self, seq_ids: Sequence[int], states: Sequence[SequenceState]) -> _Batch:
        for seq_id, state in zip(seq_ids, states, strict=True):
            if seq_id not in self._numbers:
                self._numbers[seq_id] = self._add(state)
        numbers = [self._numbers[seq_id] for seq_id in seq_ids]
        return _Batch(
            states,
            numbers,
            torch.tensor(numbers, dtype=torch.int64),
            [(number, state.counts) for number, state in zip(numbers, states, strict=True) if state.counts is not None],
        )

    def _add(self, state: SequenceState) -> int:
        params = state.params
        return self._table.add(
            key=signed_key(state.choice_key),
            position=state.output_position,
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            adjustments=_adjustments(state),
        )


def _adjustments(state: SequenceState) -> Adjustments | None:
    params, bias = state.params, state.params.logit_bias
    if not (state.changes_logits or state.end_token_ids):
        return None
    return Adjustments(
        bias_ids=np.array(list(bias), dtype=np.int64),
        bias_values=np.array(list(bias.values()), dtype=np.float32),
        banned_ids=np.array(state.end_token_ids, dtype=np.int64),
        min_tokens=params.min_tokens,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )
