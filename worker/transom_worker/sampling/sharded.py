"""Sampling where every rank has the logits of a slice of the vocabulary.

Legend: S rows that sample, N rows of them that are decided by their best score, R rows of logits, V this rank's slice of the
vocabulary, W the whole of it, K ranks.

A greedy row, and a noisy one without filters, is won by the token with the best score, and a token's score needs no other token:
each rank finds its best, and the ranks exchange one (score, id) pair a row. Other rows (filters, penalties, bias, forbidden tokens,
a grammar, log-probabilities) are gathered on the first rank, which samples them and tells the others.

Every rank keeps the state of every sequence, because which rows are gathered, and the noise, follow from it; then a step's ids
are all that ranks have to tell each other. What costs time, the counts of penalised tokens, all ranks keep at the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transom_worker.contract import TokenLogprobs
from transom_worker.parallel import Parallel
from transom_worker.sampling.gumbel_max import gumbel_argmax
from transom_worker.sampling.logprobs import MAX_ROWS_PER_PASS, token_logprobs
from transom_worker.sampling.row_ops import first_argmax, take_rows
from transom_worker.sampling.sampler import Sampler, SamplerOutput
from transom_worker.sampling.sequence_state import SequenceState
from transom_worker.sampling.temperature import apply_temperature, noise_keys


class ShardedSampler(Sampler):
    """A sampler on each rank, told the same on all; one rank alone is a plain `Sampler`.

    An error on one rank leaves the others waiting for it: whoever catches it closes the communicator.
    """

    def __init__(self, parallel: Parallel, *, first_id: int = 0, eos_token_ids: Sequence[int] = ()) -> None:
        """`first_id` is the token id of this rank's first column; slices follow each other in order of rank, none is empty."""
        super().__init__(eos_token_ids=eos_token_ids)
        self._parallel = parallel
        self._first_id = first_id

    def sample(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> SamplerOutput:
        """The next token of each sequence, the same on every rank; log-probabilities on the first alone.

        `grammar_mask` is of the whole vocabulary. Raises RankLost.
        """
        if self._parallel.size == 1 or not seq_ids:
            return super().sample(logits_SV, seq_ids, grammar_mask)
        states = [self._states[seq_id] for seq_id in seq_ids]
        whole = [row for row, state in enumerate(states) if grammar_mask is not None or _needs_whole_row(state)]
        sliced = sorted(set(range(len(states))).difference(whole))
        result = SamplerOutput(token_ids=[0] * len(states))
        if sliced:
            best = self._best(take_rows(logits_SV, sliced), [states[row] for row in sliced])
            _fill(result.token_ids, sliced, best)
        if whole:
            sampled = self._sample_whole(logits_SV, whole, [seq_ids[row] for row in whole], grammar_mask)
            _fill(result.token_ids, whole, sampled.token_ids)
            if sampled.logprobs:
                result.logprobs = [None] * len(states)
                _fill(result.logprobs, whole, sampled.logprobs)
        return result

    def gather_rows(self, logits_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """Those rows with the columns of all ranks, [len(rows), W], on the first rank; None on others. Raises RankLost."""
        part = take_rows(logits_RV, rows)
        if self._parallel.size == 1:
            return part
        slices = self._parallel.comm.gather(part)
        return None if slices is None else torch.cat(slices, -1)

    def token_logprobs(self, logits_RV: torch.Tensor, chosen: list[int], num_top: list[int]) -> list[TokenLogprobs]:
        """As `logprobs.token_logprobs`, of all ranks' columns, on the first rank; nothing on others. Raises RankLost."""
        if self._parallel.size == 1:
            return token_logprobs(logits_RV, chosen, num_top)
        result: list[TokenLogprobs] = []
        for first in range(0, len(chosen), MAX_ROWS_PER_PASS):
            rows = range(first, min(first + MAX_ROWS_PER_PASS, len(chosen)))
            whole = self.gather_rows(logits_RV, rows)
            if whole is not None:
                result += token_logprobs(whole, chosen[first : rows.stop], num_top[first : rows.stop])
        return result

    def _best(self, logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
        """The ids with the best scores of all ranks; of equal ones the lowest, which is the first rank's."""
        score_N, token_ids_N = _best_of_slice(logits_NV, states, self._first_id)
        pairs_K2N = token_ids_N.new_zeros(self._parallel.size, 2, len(states))
        pairs_K2N[self._parallel.rank, 0] = score_N.view(torch.int64)
        pairs_K2N[self._parallel.rank, 1] = token_ids_N
        self._parallel.comm.all_reduce_(pairs_K2N)  # every other rank adds zeros
        winner_N1 = first_argmax(pairs_K2N[:, 0].view(torch.float64).T)[:, None]
        best: list[int] = pairs_K2N[:, 1].T.gather(1, winner_N1)[:, 0].tolist()
        return best

    def _sample_whole(
        self, logits_SV: torch.Tensor, rows: Sequence[int], seq_ids: Sequence[int], grammar_mask: bytes | None
    ) -> SamplerOutput:
        logits_NW = self.gather_rows(logits_SV, rows)
        sampled = SamplerOutput(token_ids=[0] * len(rows))
        if logits_NW is not None:
            sampled = super().sample(logits_NW, seq_ids, grammar_mask)
        token_ids = torch.tensor(sampled.token_ids, device=logits_SV.device)
        sampled.token_ids = self._parallel.comm.broadcast_(token_ids).tolist()
        return sampled


def _needs_whole_row(state: SequenceState) -> bool:
    params = state.params
    return state.changes_logits or params.logprobs is not None or (state.has_filters and not params.greedy)


def _best_of_slice(
    logits_NV: torch.Tensor, states: Sequence[SequenceState], first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's best score among this rank's tokens, float64 [N], and its id, int64 [N]."""
    column_N1 = first_argmax(logits_NV)[:, None]
    score_N = logits_NV.gather(1, column_N1)[:, 0].to(torch.float64)
    token_ids_N = column_N1[:, 0] + first_id
    noisy = [row for row, state in enumerate(states) if not state.params.greedy]
    if noisy:
        noisy_states = [states[row] for row in noisy]
        logits = apply_temperature(take_rows(logits_NV, noisy), noisy_states)
        score_N[noisy], token_ids_N[noisy] = gumbel_argmax(logits, noise_keys(logits, noisy_states), first_id=first_id)
    return score_N, token_ids_N


def _fill(values: list[Any], rows: Sequence[int], found: Sequence[Any]) -> None:
    for row, value in zip(rows, found, strict=True):
        values[row] = value
