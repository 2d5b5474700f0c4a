"""`StepPlanner`: decides which sequences compute how many tokens in a step (continuous batching with chunked prefill).

Running sequences come first, in order; then waiting sequences are admitted while tokens and running slots are left. A prompt
that is longer than the step's budget is computed in chunks over several steps. If a running sequence computes the prefix of a
waiting one now, the waiting one may become a *waiter* for that prefix (`in_flight_prefixes`). Example with
`max_num_batched_tokens` of 64: two running sequences decode one token each, and a new prompt of 100 tokens gets the other 62;
the next step computes its last 38.

If several clients have work, each gets its *share* of a step's tokens (`step_shares`) and time (`time_shares`), and clients take
turns at being admitted (`clients`). If steps have a target time, a step computes fewer prompt tokens while other requests decode or
wait, and each prompt gets a share of them (`prompt_pace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from transom_core.config import SchedulerConfig
from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.attention_history import AttentionHistory
from transom_worker.scheduling.clients import Client
from transom_worker.scheduling.plan_builder import PlanBuilder
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan
from transom_worker.scheduling.step_budget import StepBudget, StepTokenLimit
from transom_worker.scheduling.step_shares import StepShares
from transom_worker.scheduling.work_counts import WorkCounts

MAX_NEW_WAITERS = 32  # sequences that may begin to wait for a prefix in one step: each costs a hash of its prompt


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and the sequence of each of its rows.

    `grammar_rows` lists the rows that sample a token for a sequence with a grammar, as (number among the sampling rows, request
    id). If there are any, the plan needs a `grammar_mask`.
    """

    plan: StepPlan
    rows: list[Sequence]
    grammar_rows: list[tuple[int, str]]


class StepPlanner:
    """Makes the plans, each with the next step id. `token_limit` bounds their tokens; `admission` admits sequences and gives them
    blocks.

    `max_chunk` is the most tokens of one sequence in a step (`step_budget.chunk_limit`); None: there is no such bound. `pace`
    knows what rows and prompt tokens cost.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        token_limit: StepTokenLimit,
        admission: AdmissionControl,
        work: WorkCounts,
        *,
        max_chunk: int | None,
        pace: PromptPace,
    ) -> None:
        self._config = config
        self._token_limit = token_limit
        self._admission = admission
        self._work = work
        self._max_chunk = max_chunk
        self._shares = StepShares(
            admission, pace, max_num_seqs=config.max_num_seqs, max_chunk=max_chunk, shares_time=config.share_step_time
        )
        self._next_step = 0

    def plan(self, *, steps_in_flight: int) -> PlannedStep | None:
        """Plan the next step while `steps_in_flight` others have not answered; None if nothing can be computed now."""
        cache = self._admission.cache
        num_tokens = self._token_limit.num_tokens
        self._admission.begin_step()
        shares = self._shares.of_step(num_tokens)
        builder = PlanBuilder(self._next_step, cache.retentions, self._work)
        budget = StepBudget(num_tokens, block_size=cache.block_size, max_chunk=self._max_chunk)
        self._add_rows(builder, budget, shares, steps_in_flight=steps_in_flight)
        # If no sequence with a share got blocks, plan without shares, so that some sequence makes progress.
        if not (builder.rows or steps_in_flight) and shares is not None:
            self._add_rows(builder, budget, None, steps_in_flight=steps_in_flight)
        if not (builder.rows or self._must_reach_ranks(steps_in_flight)):
            return None
        plan = builder.finish(self._admission.take_finished_ids(), cache.copies.take())
        self._next_step += 1
        self._shares.planned(plan, builder.rows)
        self._work.planned(num_rows=len(builder.rows), num_tokens=num_tokens - budget.num_tokens)
        return PlannedStep(plan, builder.rows, builder.grammar_rows)

    def plan_copies(self) -> StepPlan:
        """Return a plan that makes the queued copies and computes nothing; its result comes when copies to the disk are written."""
        cache = self._admission.cache
        builder = PlanBuilder(self._next_step, cache.retentions, self._work)
        self._next_step += 1
        plan = builder.finish([], cache.copies.take())
        plan.waits_for_disk = True
        return plan

    def _must_reach_ranks(self, steps_in_flight: int) -> bool:
        """Return whether the ranks must get a plan even if it has no rows: because it carries a load or copies for which an import
        waits, or asks which loads are done."""
        imports = self._admission.cache.tiers.imports
        if not (self._admission.moves.is_loading or imports.is_fetching or imports.is_waiting):
            return False
        return not steps_in_flight or any(copy.ticket for copy in self._admission.cache.copies.waiting)

    def _add_rows(
        self, builder: PlanBuilder, budget: StepBudget, shares: Mapping[Sequence, int] | None, *, steps_in_flight: int
    ) -> None:
        """Add rows for running sequences, then for waiting ones unless a running one was preempted.

        A preemption means that memory is short. But if the plan would be empty and no step is in flight, waiting ones are tried.
        """
        preempted = self._add_running(builder, budget, shares, steps_in_flight=steps_in_flight)
        if not preempted or not (builder.rows or steps_in_flight):
            self._add_waiting(builder, budget, shares)

    def _add_running(
        self, builder: PlanBuilder, budget: StepBudget, shares: Mapping[Sequence, int] | None, *, steps_in_flight: int
    ) -> bool:
        """Add rows for running sequences, in order; return whether one was preempted."""
        before = self._work.num_preempted
        running = list(self._admission.running)
        # If not even one token is there for each sequence, clients take turns at the tokens.
        if len(running) > budget.num_tokens and len(self._admission.clients) > 1:
            running = self._admission.clients.running_in_turns()
        for index, sequence in builder.add_decodes(running, budget, shares):
            num_after = len(running) - index - 1
            # How many tokens the budget allows.
            ready = (
                sequence.num_ready if sequence.history is None else self._before_decision(sequence, sequence.history)
            )
            if sequence.status is not SequenceStatus.RUNNING or ready <= 0:
                continue
            ready = min(ready, self._admission.before_checkpoint(sequence))
            # A chunk leaves a token for each running sequence after it, so that a long prompt does not pause their outputs.
            count = (
                1 if ready == 1 else min(ready, max(1, budget.num_tokens - num_after - self._reserved_before(sequence)))
            )
            if shares is not None:
                count = min(count, shares.get(sequence, int(ready == 1)))
            if count > 1 or sequence.num_in_flight:
                count = budget.fit(sequence, count)
            # For how many of these tokens there are KV blocks.
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
            if not sequence.num_tokens_on_ranks:  # its blocks were loaded
                builder.introduce(sequence)
            builder.add_row(sequence, blocks, count)
        return self._work.num_preempted > before

    def _before_decision(self, sequence: Sequence, history: AttentionHistory) -> int:
        """Return how many tokens of a sequence can be computed before its KV policy's next decision.

        If the decision is due, take it; but return 0 if a step in flight still computes the sequence, since the decision needs its
        result.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return 0
        if sequence.scheduled == history.next_decision:
            if sequence.num_in_flight or not sequence.num_ready:
                return 0
            self._admission.apply_policy(sequence, history)
        return min(sequence.num_ready, history.next_decision - sequence.scheduled)

    def _reserved_before(self, sequence: Sequence) -> int:
        """Return how many tokens a running sequence leaves to former waiters that come before it in order."""
        num_free_slots = self._config.max_num_seqs - self._admission.num_running_slots_used
        return self._admission.clients.reserved_before(sequence, num_free_slots=num_free_slots)

    def _add_waiting(self, builder: PlanBuilder, budget: StepBudget, shares: Mapping[Sequence, int] | None) -> None:
        """Admit waiting sequences and add their rows, until the step is full or no client is left to try.

        Clients take turns. A client drops out (`no_share`, `no_room`) when its first sequence has no share or does not fit. Before
        that, it may claim the slot or memory of another client's sequence (`fair_preemption`).
        """
        admission = self._admission
        no_share: set[Client] = set()
        no_room: set[Client] = set()
        num_new_waiters = 0
        while budget.for_new and (client := admission.next_client(no_share, no_room)) is not None:
            if admission.num_running_slots_used >= self._config.max_num_seqs:
                if len(admission.clients) > 1 and admission.claim_slot(client):
                    continue
                return
            num_tokens = budget.for_new
            if shares is not None:
                num_tokens = min(num_tokens, shares.get(client.queue.first, 0))
            if not num_tokens:
                no_share.add(client)
                continue
            admitted = admission.admit_next(client, num_tokens)
            if admitted is None:
                if not admission.claim_blocks(client):
                    no_room.add(client)
                continue
            sequence, count = admitted
            if not count:  # it became a waiter, or loads its blocks first
                num_new_waiters += 1
                if num_new_waiters == MAX_NEW_WAITERS:
                    return
                continue
            assert sequence.blocks is not None
            builder.introduce(sequence)
            budget.take(sequence, count)
            builder.add_row(sequence, sequence.blocks, count)
