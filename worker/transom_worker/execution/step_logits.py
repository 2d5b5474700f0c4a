"""`StepLogits`: the logits of a step, computed when they are read, so that a step never holds the logits of a whole prompt at once.

A request for prompt log-probabilities needs the logits of every prompt token. A chunk of 8,192 tokens over a vocabulary of 150,000
would take 4.9 GB of logits; its hidden states take some 0.1 GB. So such a step keeps the hidden states. It computes the logits of
the sampled rows at once, and those of prompt positions `MAX_ROWS_PER_PASS` rows at a time.

Legend: R rows whose logits are wanted, S rows that are sampled, N hidden width, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from transom_worker.sampling.logprobs import MAX_ROWS_PER_PASS
from transom_worker.scheduling.step import StepPlan


def logit_row_ends(plan: StepPlan) -> list[int]:
    """Return the end of each sequence's rows among the R rows of logits, [B]: sequence b has rows [ends[b - 1], ends[b])."""
    ends, total = [], 0
    for start, count, first in zip(plan.start, plan.count, plan.logits_from, strict=True):
        total += max(0, start + count - first)
        ends.append(total)
    return ends


class StepLogits:
    """Logits of one step. `sampled_SV` are those of the sampled rows, in order."""

    def __init__(self, plan: StepPlan, rows_R: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`to_logits` turns any of the rows `rows_R` into logits; the rows are hidden states [R, N], or already logits."""
        self._rows, self._to_logits = rows_R, to_logits
        self.has_others = len(rows_R) > plan.sample.count(1)  # rows that are not sampled
        sampled = rows_R
        if self.has_others:
            ends = logit_row_ends(plan)
            last_S = torch.tensor([ends[b] - 1 for b, sample in enumerate(plan.sample) if sample], dtype=torch.int64)
            sampled = rows_R[last_S.to(rows_R.device, non_blocking=True)]
        self.sampled_SV = to_logits(sampled)

    def slices(self, first: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the logits of the rows [first, end) of the R rows in slices, each with its first row."""
        for begin in range(first, end, MAX_ROWS_PER_PASS):
            yield begin, self._to_logits(self._rows[begin : min(end, begin + MAX_ROWS_PER_PASS)])


def ready_logits(plan: StepPlan, logits_RV: torch.Tensor) -> StepLogits:
    """Return the logits of a step whose forward pass computes all of them, as decode steps do."""
    return StepLogits(plan, logits_RV, lambda rows: rows)
