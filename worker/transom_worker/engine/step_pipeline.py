"""Plans out to the ranks, results back: scheduler and executor kept in step, with up to `steps_in_flight` plans between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from transom_worker.execution.executor import Executor
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepTimings


class FinishedStep(NamedTuple):
    """A step whose result has arrived (at `received_s` of the performance counter) and was applied."""

    num_tokens: int
    num_seqs: int
    timings: StepTimings
    received_s: float
    outputs: list[SequenceOutput]


class StepPipeline:
    """The plans that are in flight. Results come back in their order."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, steps_in_flight: int) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._steps_in_flight = steps_in_flight
        self._sizes: deque[tuple[int, int]] = deque()  # tokens and sequences of plans in flight

    @property
    def is_busy(self) -> bool:
        """Whether a result is due."""
        return bool(self._sizes)

    def fill(self) -> Iterator[StepPlan]:
        """Submit plans while more may be in flight and something can run; gives each once it is submitted."""
        while len(self._sizes) < self._steps_in_flight:
            plan = self._scheduler.schedule()
            if plan is None:
                return
            self._executor.submit(plan)
            self._sizes.append((plan.num_tokens, len(plan.seq_ids)))
            yield plan

    def receive(self) -> FinishedStep:
        """Wait for the oldest plan's result, then publish and free by it."""
        result = self._executor.receive()
        received_s = time.perf_counter()
        num_tokens, num_seqs = self._sizes.popleft()
        return FinishedStep(num_tokens, num_seqs, result.timings, received_s, self._scheduler.receive(result))

    def drop(self) -> list[str]:
        """A step was interrupted: wait for nothing that is in flight; returns the requests that were dropped with it."""
        self._executor.drop_in_flight()
        self.forget()
        return self._scheduler.fail_in_flight()

    def forget(self) -> None:
        """No result will come any more: the ranks are gone."""
        self._sizes.clear()
