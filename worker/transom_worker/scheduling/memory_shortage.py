"""Handles a step that ran out of memory: `largest_row` finds the request that asked for the most, and `StepTokenLimit` makes steps
smaller for a while.

A step needs more memory the more tokens it has, the more positions need logits, and the more tokens its queries attend to. At start
the memory of the largest step is measured and kept free (`execution.setup.dummy_run`). So a step runs out of memory only if another
process takes memory of the device, or if the measurement missed something. Then the limit is half of the step that failed, and it
doubles after every `STEPS_BEFORE_GROWTH` steps with a result. Example with `max_num_batched_tokens` of 2,048 and a failed step of
1,500 tokens: 750 tokens for 16 steps, 1,500 for 16 steps, then 2,048.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan

STEPS_BEFORE_GROWTH = 16


class LargestRow(NamedTuple):
    """The row of a step that asked for the most memory."""

    sequence: Sequence
    num_tokens: int  # that the row computes
    num_logit_rows: int  # positions whose logits it needs
    num_attended: int  # tokens that its last query attends to, itself included


def largest_row(plan: StepPlan, rows: Iterable[Sequence]) -> LargestRow:
    """Return the row of a plan with the most tokens and logits together; of equal rows the one with the longest context, then the
    last."""
    columns = zip(rows, plan.start, plan.count, plan.logits_from, strict=True)
    found = [
        LargestRow(sequence, count, max(0, start + count - logits_from), start + count)
        for sequence, start, count, logits_from in columns
    ]
    # `max` returns the first of equal rows, hence the reversed order.
    return max(reversed(found), key=lambda row: (row.num_tokens + row.num_logit_rows, row.num_attended))


class StepTokenLimit:
    """The most tokens of a step: `max_tokens`, and fewer for a while after a step that ran out of memory."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = max_tokens
        self._num_steps = 0  # with a result, since the limit changed

    def ran_out_of_memory(self, num_tokens: int) -> None:
        """Halve the limit, or the size of the step of `num_tokens` tokens that ran out of memory if that is smaller."""
        self.num_tokens, self._num_steps = max(1, min(num_tokens, self.num_tokens) // 2), 0

    def stepped(self) -> None:
        """Note that a step has a result; after `STEPS_BEFORE_GROWTH` of them a lowered limit doubles."""
        if self.num_tokens == self._max_tokens:
            return
        self._num_steps += 1
        if self._num_steps == STEPS_BEFORE_GROWTH:
            self.num_tokens, self._num_steps = min(self._max_tokens, 2 * self.num_tokens), 0
