"""`StepPlanner`: decides which sequences compute how many tokens in a step (continuous batching with chunked prefill).

Running sequences come first, in order; then waiting sequences are admitted while tokens and running slots are left. A prompt that
is longer than the step's budget is computed in chunks over several steps. A waiting sequence whose prefix a running sequence
computes now may become a *waiter*: it waits for that prefix (`in_flight_prefixes`). Example with `max_num_batched_tokens` of 64:
two running sequences decode one token each, and a new prompt of 100 tokens gets the other 62; the next step computes its last 38.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_worker.config import SchedulerConfig
from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.plan_builder import PlanBuilder
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan
from transom_worker.scheduling.step_budget import StepBudget
from transom_worker.scheduling.work_counts import WorkCounts

MAX_NEW_WAITERS = 32  # sequences that may begin to wait for a prefix in one step: each costs a hash of its prompt


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and the sequence of each of its rows."""

    plan: StepPlan
    rows: list[Sequence]


class StepPlanner:
    """Makes the plans, each with the next step id; `admission` admits sequences and gives them blocks.

    `max_chunk` is the most tokens of one sequence in a step (`step_budget.chunk_limit`), None for no such bound.
    """

    def __init__(
        self, config: SchedulerConfig, admission: AdmissionControl, work: WorkCounts, *, max_chunk: int | None
    ) -> None:
        self._config = config
        self._admission = admission
        self._work = work
        self._max_chunk = max_chunk
        self._next_step = 0

    def plan(self, *, steps_in_flight: int) -> PlannedStep | None:
        """Plan the next step while `steps_in_flight` others have not answered; None if nothing can be computed now."""
        cache = self._admission.cache
        builder = PlanBuilder(self._next_step, cache.retentions, self._work)
        budget = StepBudget(self._config.max_num_batched_tokens, block_size=cache.block_size, max_chunk=self._max_chunk)
        preempted = self._add_running(builder, budget, steps_in_flight=steps_in_flight)
        if not preempted or not (builder.rows or steps_in_flight):
            self._add_waiting(builder, budget)
        if not builder.rows:
            return None
        plan = builder.finish(self._admission.take_finished_ids(), cache.take_copies())
        self._next_step += 1
        self._work.planned(
            num_rows=len(builder.rows), num_tokens=self._config.max_num_batched_tokens - budget.num_tokens
        )
        return PlannedStep(plan, builder.rows)

    def _add_running(self, builder: PlanBuilder, budget: StepBudget, *, steps_in_flight: int) -> bool:
        """Add rows for running sequences, in order; return whether one was preempted."""
        before = self._work.num_preemptions
        num_after = len(self._admission.running)
        for sequence in list(self._admission.running):
            num_after -= 1
            if budget.num_tokens <= 0:
                break
            # How many tokens the budget allows.
            ready = sequence.num_ready
            if sequence.status is not SequenceStatus.RUNNING or ready <= 0:
                continue
            # A chunk leaves a token for each running sequence behind it, so that a long prompt does not pause their outputs.
            count = (
                1 if ready == 1 else min(ready, max(1, budget.num_tokens - num_after - self._reserved_before(sequence)))
            )
            if count > 1 or sequence.num_in_flight:
                count = budget.fit(sequence, count)
            # For how many of them there are KV blocks.
            blocks = sequence.blocks
            assert blocks is not None
            if count and sequence.scheduled + count > blocks.capacity_tokens:
                count = self._admission.allocate_or_preempt(sequence, count, steps_in_flight=steps_in_flight)
            if not count:
                continue
            if count > 1 or sequence.num_in_flight:
                budget.take(sequence, count)
            else:
                budget.num_tokens -= 1  # one token needs no blocks beyond those of its window
            builder.add_row(sequence, blocks, count)
        return self._work.num_preemptions > before

    def _reserved_before(self, sequence: Sequence) -> int:
        """Return how many tokens a running sequence leaves to former waiters that come before it in order."""
        num_free_slots = self._config.max_num_seqs - self._admission.num_running_slots_used
        return self._admission.reserved_before(sequence, num_free_slots=num_free_slots)

    def _add_waiting(self, builder: PlanBuilder, budget: StepBudget) -> None:
        """Admit waiting sequences in order and add their rows, until one does not fit or the step is full."""
        admission = self._admission
        num_new_waiters = 0
        while admission.waiting and budget.for_new and admission.num_running_slots_used < self._config.max_num_seqs:
            admitted = admission.admit_next(budget.for_new)
            if admitted is None:
                return
            sequence, count = admitted
            if not count:
                num_new_waiters += 1
                if num_new_waiters == MAX_NEW_WAITERS:
                    return
                continue
            assert sequence.blocks is not None
            builder.introduce(sequence)
            budget.take(sequence, count)
            builder.add_row(sequence, sequence.blocks, count)
