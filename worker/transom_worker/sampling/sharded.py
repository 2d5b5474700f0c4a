"""Samples from sharded logits: every rank has the logits of a slice of the vocabulary.

There are two kinds of rows:

- local row: greedy, or random without filters. The token with the best score wins, and a token's score depends on no other token.
  So each rank finds the best token of its slice, and the ranks exchange one (score, id) pair for each row.
- gathered row: has filters, penalties, bias, banned tokens, a grammar or log-probabilities. The ranks send its logits to rank
  0, which samples the row and broadcasts the token.

Every rank keeps the sampling state of every sequence. The state determines which rows are gathered, and the noise. So ranks
exchange nothing about the state except the sampled ids. All ranks count penalised tokens at the same time.

Legend: S rows that are sampled, N some of these rows, R rows of logits, V this rank's slice of the vocabulary, W the whole
vocabulary, K ranks.
"""

from collections.abc import Callable, Sequence

import torch

from transom_core.contract import LogprobTable
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.sample import best_of_slice
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.sampling.adjustments import HeldRows
from transom_worker.sampling.logprobs import MAX_ROWS_PER_PASS, logprob_table
from transom_worker.sampling.sampler import Sampler, SamplerOutput, put_rows, take_rows
from transom_worker.sampling.sequence_state import SequenceState


class ShardedSampler(Sampler):
    """The sampler of one rank. All ranks call it in the same way; with one rank it is a plain `Sampler`.

    An error on one rank leaves the other ranks waiting, so the caller must close the communicator on an error.
    """

    def __init__(self, parallel: Parallel, *, first_id: int = 0, eos_token_ids: Sequence[int] = ()) -> None:
        """`first_id` is the token id of this rank's first column. The ranks' slices are consecutive, and none is empty."""
        super().__init__(eos_token_ids=eos_token_ids)
        self._parallel = parallel
        self._first_id = first_id

    def sample(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> SamplerOutput:
        """Return the next token of each sequence, the same on every rank; only rank 0 returns log-probabilities.

        `grammar_mask` covers the whole vocabulary. Raises RankLost if another rank was lost.
        """
        if self._parallel.size == 1 or not seq_ids:
            return super().sample(logits_SV, seq_ids, grammar_mask)
        result = SamplerOutput(token_ids=[])

        def sample_whole(logits_NW: torch.Tensor, gathered: list[int], grammar_mask: bytes | None) -> torch.Tensor:
            sampled = super(ShardedSampler, self).sample(logits_NW, [seq_ids[row] for row in gathered], grammar_mask)
            if sampled.logprobs:
                result.logprobs = [None] * len(seq_ids)
                for row, logprobs in zip(gathered, sampled.logprobs, strict=True):
                    result.logprobs[row] = logprobs
            return torch.tensor(sampled.token_ids, device=logits_NW.device)

        result.token_ids = self._sample_on_ranks(logits_SV, seq_ids, grammar_mask, sample_whole).tolist()
        return result

    def launch(
        self, logits_SV: torch.Tensor, seq_ids: Sequence[int], grammar_mask: bytes | None = None
    ) -> torch.Tensor | None:
        """See `Sampler.launch`. With several ranks, every rank gets the tokens on its device. Raises RankLost."""
        if self._parallel.size == 1:
            return super().launch(logits_SV, seq_ids, grammar_mask)
        rows = self._rows_of(seq_ids)
        if rows.logprob_rows or uses_cpu_kernels(logits_SV):
            return None

        def sample_whole(logits_NW: torch.Tensor, gathered: list[int], grammar_mask: bytes | None) -> torch.Tensor:
            return self._token_ids(logits_NW, self._rows_of([seq_ids[row] for row in gathered]), grammar_mask)

        return self._sample_on_ranks(logits_SV, seq_ids, grammar_mask, sample_whole)

    def gather_rows(self, logits_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """On rank 0, return these rows with the columns of all ranks, [len(rows), W]; None on other ranks. Raises RankLost."""
        part = take_rows(logits_RV, rows)
        if self._parallel.size == 1:
            return part
        slices = self._parallel.comm.gather(part, fixed_widths=True)
        return None if slices is None else torch.cat(slices, -1)

    def logprob_table(self, logits_RV: torch.Tensor, chosen: list[int], num_top: int) -> LogprobTable:
        """On rank 0, return `logprobs.logprob_table` over all ranks' columns; an empty table on the others. Raises RankLost."""
        if self._parallel.size == 1:
            return logprob_table(logits_RV, chosen, num_top)
        table = LogprobTable(1 + num_top)
        for first in range(0, len(chosen), MAX_ROWS_PER_PASS):
            rows = range(first, min(first + MAX_ROWS_PER_PASS, len(chosen)))
            gathered = self.gather_rows(logits_RV, rows)
            if gathered is not None:
                table.extend(logprob_table(gathered, chosen[first : rows.stop], num_top))
        return table

    def _best_of_slices(
        self, logits_NV: torch.Tensor, seq_ids: Sequence[int], states: Sequence[SequenceState]
    ) -> torch.Tensor:
        """Return the ids with the best scores of all ranks, int64 [N]; of equal scores, the lowest."""
        if uses_cpu_kernels(logits_NV):
            score_N = torch.empty(len(states), dtype=torch.float64)
            token_ids_N = self._records.sample(logits_NV, seq_ids, states, first_id=self._first_id, scores_S=score_N)
        else:
            arrays = self._rows_of(seq_ids).arrays()
            rows = self._uploads_to(logits_NV.device).tensors({name: arrays[name] for name in ("keys", "temperature")})
            score_N, token_ids_N = best_of_slice(logits_NV, **rows, first_id=self._first_id)
        # The all-reduce gathers the pairs, because other ranks add zeros to a rank's row. Scores travel as the integers with the
        # same bits, which the addition of zeros does not change.
        pairs_K2N = token_ids_N.new_zeros(self._parallel.size, 2, len(states))
        pairs_K2N[self._parallel.rank, 0] = score_N.view(torch.int64)
        pairs_K2N[self._parallel.rank, 1] = token_ids_N
        self._parallel.comm.all_reduce_(pairs_K2N)
        winner_1N = pairs_K2N[:, 0].view(torch.float64).max(0, keepdim=True).indices
        return pairs_K2N[:, 1].gather(0, winner_1N)[0]

    def _sample_on_ranks(
        self,
        logits_SV: torch.Tensor,
        seq_ids: Sequence[int],
        grammar_mask: bytes | None,
        sample_whole: Callable[[torch.Tensor, list[int], bytes | None], torch.Tensor],
    ) -> torch.Tensor:
        """Return the next tokens on every rank's device, int64 [S].

        Rank 0 calls `sample_whole` with the whole logits of the gathered rows, their numbers, and their part of the mask.
        """
        states = [self._states[seq_id] for seq_id in seq_ids]
        held = HeldRows(grammar_mask, len(states))
        gathered = [row for row, state in enumerate(states) if row in held.rows or _needs_gathering(state)]
        local = sorted(set(range(len(states))).difference(gathered))
        token_ids_S = torch.empty(len(states), dtype=torch.int64, device=logits_SV.device)
        if local:
            part = take_rows(logits_SV, local)
            best_N = self._best_of_slices(part, [seq_ids[row] for row in local], [states[row] for row in local])
            put_rows(token_ids_S, local, best_N)
        if gathered:
            chosen_N = torch.zeros(len(gathered), dtype=torch.int64, device=logits_SV.device)
            logits_NW = self.gather_rows(logits_SV, gathered)
            if logits_NW is not None:
                chosen_N = sample_whole(logits_NW, gathered, held.mask(gathered))
            put_rows(token_ids_S, gathered, self._parallel.comm.broadcast_(chosen_N))
        return token_ids_S


def _needs_gathering(state: SequenceState) -> bool:
    """Return whether a row needs the logits of the whole vocabulary on one rank."""
    params = state.params
    return state.changes_logits or params.logprobs is not None or (state.has_filters and not params.greedy)
