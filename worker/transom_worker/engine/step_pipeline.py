"""Sends plans from the scheduler to the executor, and results back, with up to `steps_in_flight` plans submitted at once.

With two plans in flight the ranks begin the next step while the engine still handles the last one's tokens. Results come back
in the order of their plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from transom_worker.engine.answer_grammars import AnswerGrammars
from transom_worker.execution.executor import Executor
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult, StepTimings


class FinishedStep(NamedTuple):
    """A step whose result has arrived, at `received_s` of the performance counter, and is applied to the scheduler."""

    num_tokens: int
    num_seqs: int
    timings: StepTimings
    received_s: float
    outputs: list[SequenceOutput]
    result: StepResult


class StepPipeline:
    """The submitted plans without a result."""

    def __init__(self, scheduler: Scheduler, executor: Executor, grammars: AnswerGrammars) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._executor = executor
        self._sizes: deque[tuple[int, int]] = deque()  # tokens and sequences of each submitted plan

    @property
    def is_busy(self) -> bool:
        """Whether a submitted plan has no result yet."""
        return bool(self._sizes)

    def fill(self) -> Iterator[StepPlan]:
        """Submit plans until the scheduler has none, or `steps_in_flight` are submitted; yields each plan after it is submitted."""
        while (plan := self._scheduler.schedule()) is not None:
            if grammar_rows := self._scheduler.steps_in_flight[-1].grammar_rows:
                plan.grammar_mask = self._grammars.plan_mask(grammar_rows, sum(plan.sample))
            self._executor.submit(plan)
            self._sizes.append((plan.num_tokens, len(plan.seq_ids)))
            yield plan

    def receive(self) -> FinishedStep:
        """Wait for the oldest plan's result, and apply it to the scheduler."""
        result = self._executor.receive()
        received_s = time.perf_counter()
        num_tokens, num_seqs = self._sizes.popleft()
        return FinishedStep(num_tokens, num_seqs, result.timings, received_s, self._scheduler.receive(result), result)

    def forget(self) -> None:
        """Forget the submitted plans: the ranks are lost, and no result will come."""
        self._sizes.clear()
