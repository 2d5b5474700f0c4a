"""Turns a step's logits into its result: samples tokens, and computes the log-probabilities of prompt tokens.

Logits are computed when they are read (`StepLogits`), so that a step never holds the logits of a whole prompt at once.
A request for prompt log-probabilities needs the logits of every prompt token. A chunk of 8,192 tokens over a vocabulary of 150,000
would take 4.9 GB of logits; its hidden states take some 0.1 GB. So such a step keeps the hidden states. It computes the logits of
the sampled rows at once, and those of prompt positions `MAX_ROWS_PER_PASS` rows at a time.

Legend: R rows whose logits are wanted, S rows that are sampled, N hidden width, V this rank's part of the vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.contract import LogprobTable, Pooling
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.device_queue import DeviceQueue, Fetch
from transom_worker.sampling.logprobs import MAX_ROWS_PER_PASS
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import NO_ID, StepPlan, StepResult


def logit_row_ends(plan: StepPlan) -> list[int]:
    """Return the end of each sequence's rows among the R rows of logits, [B]: sequence b has rows [ends[b - 1], ends[b])."""
    ends, total = [], 0
    for start, count, first in zip(plan.start, plan.count, plan.logits_from, strict=True):
        total += max(0, start + count - first)
        ends.append(total)
    return ends


class StepLogits:
    """Logits of one step. `sampled_SV` are those of the sampled rows, in order."""

    def __init__(
        self,
        plan: StepPlan,
        rows_R: torch.Tensor,
        to_logits: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
        to_scores: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> None:
        """`to_logits` turns any of the hidden states `rows_R` [R, N] into logits, and `to_scores` into those of a classifier; by
        default the rows are logits already."""
        self._rows, self._to_logits, self._to_scores = rows_R, to_logits, to_scores
        self.has_others = len(rows_R) > plan.sample.count(1)  # rows that are not sampled
        sampled = rows_R
        if self.has_others:
            ends = logit_row_ends(plan)
            last_S = torch.tensor([ends[b] - 1 for b, sample in enumerate(plan.sample) if sample], dtype=torch.int64)
            sampled = rows_R[last_S.to(rows_R.device, non_blocking=True)]
        self.sampled_SV = to_logits(sampled)

    def row_sum(self, first: int, end: int, pooling: Pooling) -> list[float]:
        """Return the sum of the rows [first, end) of the R rows, which are hidden states if the plan says `keeps_hidden`, or of
        their scores."""
        rows = self._to_scores(self._rows[first:end]) if pooling == "score" else self._rows[first:end]
        summed: list[float] = rows.sum(dim=0, dtype=torch.float64).tolist()
        return summed

    def slices(self, first: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the logits of the rows [first, end) of the R rows in slices, each with its first row."""
        for begin in range(first, end, MAX_ROWS_PER_PASS):
            yield begin, self._to_logits(self._rows[begin : min(end, begin + MAX_ROWS_PER_PASS)])


@dataclass(slots=True)
class SampledIds:
    """The tokens that a step samples. `row_B` has, for each batch row that samples, its index s among the sampled rows, else NO_ID.

    `ids_S` are the tokens on the device, int64 [S]; None if the host got them at once. `known` are the tokens on the host; None
    until `wait` has been called.
    """

    row_B: NDArray[np.int64]
    ids_S: torch.Tensor | None
    known: list[int] | None
    fetch: Fetch | None = None

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.known is not None or (self.fetch is not None and self.fetch.is_ready())

    def wait(self) -> list[int]:
        """Return the tokens, in order of s. This is the only place where the host waits for the device to compute them."""
        if self.known is None:
            assert self.fetch is not None
            self.known = self.fetch()
        return self.known


@torch.inference_mode()
def sample_step(
    plan: StepPlan,
    logits: StepLogits,
    result: StepResult,
    *,
    sampler: ShardedSampler,
    store: SequenceStore,
    queue: DeviceQueue,
) -> SampledIds:
    """Begin to sample, write log-probabilities into `result`, and return the sampled tokens.

    The tokens stay on the device until they are waited for, unless log-probabilities need them on the host.
    """
    if plan.keeps_hidden:
        _add_hidden_sums(plan, logits, result, store)
    row_B = np.arange(len(plan.seq_ids))
    seq_ids = plan.seq_ids
    if plan.sample.count(1) < len(seq_ids):
        samples_B = np.array(plan.sample, dtype=np.int64)
        row_B = np.where(samples_B, np.cumsum(samples_B) - 1, NO_ID)
        seq_ids = list(compress(seq_ids, plan.sample))
    ids_S = sampler.launch(logits.sampled_SV, seq_ids, plan.grammar_mask) if seq_ids and not logits.has_others else None
    if ids_S is not None:
        return SampledIds(row_B, ids_S, None, queue.fetch(ids_S))
    sampled = sampler.sample(logits.sampled_SV, seq_ids, plan.grammar_mask)
    result.logprobs = sampled.logprobs
    if logits.has_others:
        ends = logit_row_ends(plan)
        for b in range(len(plan.seq_ids)):
            logprobs = _prompt_logprobs(plan, b, logits, ends[b], sampler, store)
            if logprobs is not None:
                result.prompt_logprobs[b] = logprobs
    return SampledIds(row_B, None, sampled.token_ids)


def _add_hidden_sums(plan: StepPlan, logits: StepLogits, result: StepResult, store: SequenceStore) -> None:
    """Add up the hidden states of each row whose sequence asks for an embedding, or its scores, for the result."""
    first = 0
    for b, end in enumerate(logit_row_ends(plan)):
        if end > first and (pooling := store[plan.seq_ids[b]].pooling) is not None:
            result.hidden_sums[b] = logits.row_sum(first, end, pooling)
        first = end


def _prompt_logprobs(
    plan: StepPlan, b: int, logits: StepLogits, row_end: int, sampler: ShardedSampler, store: SequenceStore
) -> LogprobTable | None:
    """Return the log-probabilities of prompt tokens that batch row `b` computes; None if it computes none."""
    sequence = store[plan.seq_ids[b]]
    if sequence.prompt_logprobs is None:
        return None
    first, end = plan.logits_from[b], plan.start[b] + plan.count[b]
    last = min(end, sequence.num_prompt_tokens - 1)  # the last prompt position predicts the first output token
    if last <= first:
        return None
    row = row_end - (end - first)
    table = LogprobTable(1 + sequence.prompt_logprobs)
    for begin, logits_LV in logits.slices(row, row + last - first):
        position = first + begin - row
        # The logits at a position predict the token at the next one.
        chosen = sequence.ids[position + 1 : position + 1 + len(logits_LV)].tolist()
        table.extend(sampler.logprob_table(logits_LV, chosen, sequence.prompt_logprobs))
    return table
