"""Each step: which sequences compute how many tokens. Running ones come first, then waiting ones are let in."""

from __future__ import annotations

from dataclasses import dataclass

from transom_worker.config import SchedulerConfig
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.plan_builder import PlanBuilder
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan
from transom_worker.scheduling.step_budget import StepBudget, longest_chunk
from transom_worker.scheduling.work_counts import WorkCounts

MOST_ASIDE = 32  # sequences that may step aside in one step: each costs a hash of its prompt


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and the sequence of each of its rows."""

    plan: StepPlan
    rows: list[Sequence]


class StepPlanner:
    """Makes the plans, each with the next step id, and has `admission` make room for them."""

    def __init__(
        self, config: SchedulerConfig, layout: ArenaLayout, admission: AdmissionControl, work: WorkCounts
    ) -> None:
        self._config = config
        self._admission = admission
        self._work = work
        self._longest_chunk = longest_chunk(layout, admission.cache.block_size)
        self._next_step = 0

    def plan(self, *, steps_in_flight: int) -> PlannedStep | None:
        """The next step, while so many have not answered; None if nothing can be computed now."""
        cache = self._admission.cache
        builder = PlanBuilder(self._next_step, cache.retentions, self._work)
        budget = StepBudget(
            self._config.max_num_batched_tokens, block_size=cache.block_size, longest=self._longest_chunk
        )
        preempted = self._add_running(builder, budget, steps_in_flight=steps_in_flight)
        if not preempted or not (builder.rows or steps_in_flight):
            self._add_waiting(builder, budget)
        if not builder.rows:
            return None
        plan = builder.finish(self._admission.finished_ids, cache.take_copies())
        self._admission.finished_ids = []
        self._next_step += 1
        self._work.planned(
            num_rows=len(builder.rows), num_tokens=self._config.max_num_batched_tokens - budget.num_tokens
        )
        return PlannedStep(plan, builder.rows)

    def _add_running(self, builder: PlanBuilder, budget: StepBudget, *, steps_in_flight: int) -> bool:
        """Rows for running sequences, the first in order first; whether one was preempted."""
        before = self._work.num_preemptions
        num_after = len(self._admission.running)
        for sequence in list(self._admission.running):
            num_after -= 1
            if budget.num_tokens <= 0:
                break
            ready = sequence.num_ready
            if sequence.status is not SequenceStatus.RUNNING or ready <= 0:
                continue
            # a long prompt leaves a token for each sequence behind it, so that their answers flow on
            count = (
                1 if ready == 1 else min(ready, max(1, budget.num_tokens - num_after - self._reserved_before(sequence)))
            )
            if count > 1 or sequence.num_in_flight:
                count = budget.fit(sequence, count)
            blocks = sequence.blocks
            assert blocks is not None
            if count and sequence.scheduled + count > blocks.capacity_tokens:
                count = self._admission.make_room(sequence, count, steps_in_flight=steps_in_flight)
            if not count:
                continue
            if count > 1 or sequence.num_in_flight:
                budget.take(sequence, count)
            else:
                budget.num_tokens -= 1  # one token alone needs no extra blocks
            builder.add_row(sequence, blocks, count)
        return self._work.num_preemptions > before

    def _reserved_before(self, sequence: Sequence) -> int:
        num_free_slots = self._config.max_num_seqs - self._admission.num_running_slots_used
        return self._admission.reserved_before(sequence, num_free_slots=num_free_slots)

    def _add_waiting(self, builder: PlanBuilder, budget: StepBudget) -> None:
        """Rows for waiting sequences that are let in, while the next in order is, or steps aside."""
        admission = self._admission
        num_aside = 0
        while admission.waiting and budget.for_new and admission.num_running_slots_used < self._config.max_num_seqs:
            admitted = admission.admit_next(budget.for_new)
            if admitted is None:
                return
            sequence, count = admitted
            if not count:
                num_aside += 1
                if num_aside == MOST_ASIDE:
                    return
                continue
            assert sequence.blocks is not None
            builder.introduce(sequence)
            budget.take(sequence, count)
            builder.add_row(sequence, sequence.blocks, count)
