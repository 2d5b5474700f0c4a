"""Continuous batching: each step, which sequences compute how many tokens, and what a result means for them.

The oldest running sequence always makes progress: memory that it lacks is taken from the worst (priority, arrival), by recompute;
alone and still short (its blocks lie scattered over too many pages), it starts again in an empty cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from transom_worker.config import SchedulerConfig
from transom_worker.contract import Request, TokenLogprobs
from transom_worker.errors import Overloaded, RequestError
from transom_worker.kvcache.events import KvEvent
from transom_worker.kvcache.hashing import chain_root, extend_chain
from transom_worker.kvcache.hit import Hit
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.admission import check_supported, length_limit
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.plan_builder import PlanBuilder
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import Sequence, State
from transom_worker.scheduling.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    rows: list[Sequence]


class Scheduler:
    """Integers out (`schedule`), integers in (`receive`). Not thread-safe: one engine thread calls it.

    With nothing in flight, `schedule` returns a plan whenever a request could go on; sequences at their length limit wait for
    the engine's `finish`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: ArenaLayout,
        *,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.cache = KvCache(layout, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        self.preemptions = {"recompute": 0}
        self._by_request: dict[str, Sequence] = {}
        self._running = OrderedQueue()
        self._waiting = OrderedQueue()
        self._in_flight: deque[_InFlight] = deque()
        self._finished_ids: list[int] = []  # ranks have not been told yet
        self._num_arrived = 0
        self._next_seq_id = 0
        self._next_step = 0
        self._num_held = 0  # LEAVING or DONE sequences whose blocks a step in flight still uses
        self._blocked_at: int | None = None  # `cache.num_releases` when the first waiting one did not fit

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step unanswered."""
        return bool(self._by_request) or bool(self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones with them."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._in_flight)

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence, up to the model's length, that the KV pool can hold alone."""
        return self.cache.capacity_tokens(self.max_model_len)

    def take_events(self) -> list[KvEvent]:
        """KV events since the last call."""
        return self.cache.take_events()

    def stats(self) -> CacheStats:
        """The cache's state."""
        return self.cache.stats()

    # Requests in and out

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it asks for what is not supported yet, or its id is in use.
            PromptTooLong: no room for one token more within the model's length.
            RequestTooLarge: it could never fit the KV pool, even alone.
            Overloaded: the queue is full.
        """
        check_supported(request)
        limit = length_limit(request, self.cache, max_model_len=self.max_model_len)
        if request.request_id in self._by_request:
            raise RequestError(f"request_id {request.request_id!r} is already being served.", param="request_id")
        ahead = len(self._waiting) + len(self._running) - self.config.max_num_seqs
        if ahead >= self.config.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting and the limit is {self.config.max_waiting}; try again later."
            )
        self._num_arrived += 1
        ranked = (request.priority, request.arrival_s) if self.config.policy == "priority" else (0, 0.0)
        sequence = Sequence(
            request=request,
            key=(*ranked, self._num_arrived),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens_total=limit,
            root=chain_root(self.cache.block_size, cache_salt=request.cache_salt, adapter=request.adapter),
            token_ids=[*request.prompt_token_ids, *request.resumed_output_ids],
        )
        self._by_request[request.request_id] = sequence
        self._waiting.add(sequence)
        self._blocked_at = None

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it stands; whether there was one. Blocks of a step in flight go when it has answered."""
        sequence = self._by_request.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            self._blocked_at = None
        else:
            if sequence.num_in_flight and sequence.state is State.RUNNING:
                self._num_held += 1
            self._running.remove(sequence)
            if not sequence.num_in_flight:
                self._release(sequence)
        sequence.state = State.DONE
        return True

    def finish(self, request_id: str) -> None:
        """The engine saw a stop: a token in flight is discarded with its slot. Unknown ids are ignored."""
        self.abort(request_id)

    # Steps

    def schedule(self) -> StepPlan | None:
        """The next plan; None if nothing can be computed now, or `steps_in_flight` plans are unanswered."""
        if len(self._in_flight) >= self.config.steps_in_flight:
            return None
        builder = PlanBuilder(self._next_step, len(self.cache.pools))
        budget, preempted = self._schedule_running(builder)
        if not preempted or not (builder.rows or self._in_flight):
            self._schedule_waiting(builder, budget)
        if not builder.rows:
            return None
        plan = builder.finish(self._finished_ids, self.cache)
        self._finished_ids = []
        self._next_step += 1
        self._in_flight.append(_InFlight(plan, builder.rows))
        return plan

    def receive(self, result: StepResult) -> list[SequenceOutput]:
        """Take the oldest plan's result: publish and free by it, and return its new tokens in row order."""
        step = self._in_flight.popleft()
        plan = step.plan
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} where step {plan.step_id} was due")
        outputs = []
        sample = 0
        for row, sequence in enumerate(step.rows):
            samples = plan.sample[row]
            # an aborted one may have computed a token whose id was discarded
            processed = min(plan.start[row] + plan.count[row], len(sequence.token_ids))
            sequence.num_in_flight -= 1
            blocks = sequence.blocks
            assert blocks is not None
            if processed >= blocks.next_event:
                self.cache.advance(blocks, sequence.token_ids, processed)
            else:
                blocks.processed = processed
            if sequence.state is State.DONE:
                if not sequence.num_in_flight:
                    self._num_held -= 1
                    self._release(sequence)
            else:
                if result.prompt_logprobs and row in result.prompt_logprobs:
                    _collect_prompt_logprobs(sequence, result.prompt_logprobs[row])
                if samples:
                    logprobs = result.logprobs[sample] if result.logprobs else None
                    outputs.append(_take_token(sequence, result.sampled_ids[sample], logprobs))
                if sequence.state is State.LEAVING and not sequence.num_in_flight:
                    self._num_held -= 1
                    self._preempt(sequence)
            sample += samples
        return outputs

    def _schedule_running(self, builder: PlanBuilder) -> tuple[int, bool]:
        """Rows for running sequences, the first in order first; the budget left, and whether one was preempted."""
        budget = self.config.max_num_batched_tokens
        before = self.preemptions["recompute"]
        num_after = len(self._running)
        for sequence in list(self._running):
            num_after -= 1
            if budget <= 0:
                break
            ready = sequence.num_ready
            if sequence.state is not State.RUNNING or ready <= 0:
                continue
            # a long prompt leaves a token for each sequence behind it, so that their answers flow on
            count = 1 if ready == 1 else min(ready, max(1, budget - num_after))
            blocks = sequence.blocks
            assert blocks is not None
            if sequence.scheduled + count > blocks.capacity_tokens:
                count = self._make_room(sequence, count)
                if not count:
                    continue
            builder.add_row(sequence, blocks, count)
            budget -= count
        return budget, self.preemptions["recompute"] > before

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Tokens, up to `count`, that `sequence` has blocks for now; 0 if it must wait or was preempted itself."""
        while True:
            fitting = self._extend(sequence, count)
            if fitting or self._num_held:  # else what a step in flight holds comes free first
                return fitting
            victim = self._running.last
            if victim is sequence and len(self._running) == 1:
                if not self._in_flight:
                    self._restart_alone(sequence)
                return 0
            if victim.num_in_flight:
                victim.state = State.LEAVING
                self._num_held += 1
                return 0
            self._preempt(victim)
            if victim is sequence:
                return 0

    def _extend(self, sequence: Sequence, count: int) -> int:
        """Blocks for `count` more tokens, or for as many as fit by halving; 0 if not even for one."""
        blocks = sequence.blocks
        assert blocks is not None
        while count and not self.cache.extend(blocks, sequence.scheduled + count):
            count //= 2
        return count

    def _schedule_waiting(self, builder: PlanBuilder, budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting.first
            busy = len(self._running) > 0 or self._num_held > 0
            if sequence.num_ready <= 0:  # preempted at its length limit: the engine is about to finish it
                return
            if busy and (sequence.alone or any(other.alone for other in self._running)):
                return
            if busy and self._blocked_at == self.cache.num_releases:
                return
            count = self._admit(sequence, budget, busy)
            if not count:
                self._blocked_at = self.cache.num_releases
                return
            assert sequence.blocks is not None
            builder.introduce(sequence)
            builder.add_row(sequence, sequence.blocks, count)
            budget -= count

    def _admit(self, sequence: Sequence, budget: int, busy: bool) -> int:
        """Tokens that a waiting sequence starts with, 0 if its first chunk does not fit beside those that run."""
        hit = None
        if self.cache.enable_prefix_caching:
            extend_chain(sequence.chain, sequence.root, sequence.token_ids, self.cache.block_size)
            if not sequence.alone and not sequence.wants_prompt_logprobs:
                hit = self.cache.find(sequence.chain, len(sequence.token_ids))
        num_units = hit.num_units if hit else 0
        blocks = self.cache.begin(sequence.chain, sequence.root, num_units=num_units, publishes=not sequence.alone)
        sequence.blocks, sequence.scheduled = blocks, blocks.processed
        count = min(sequence.num_ready, budget)
        if busy:
            # one block for each that runs stays within reach, or they would soon preempt it
            fits = self.cache.extend(blocks, sequence.scheduled + count, reserve=len(self._running))
            count = count if fits else 0
        else:
            count = self._extend(sequence, count)
        if not count:
            self.cache.release(blocks)
            sequence.leave()
            return self._admit_alone(sequence, budget) if not busy and not sequence.alone else 0
        self._count_admission(sequence, hit)
        self._waiting.remove(sequence)
        self._running.add(sequence)
        sequence.state = State.RUNNING
        sequence.seq_id = self._next_seq_id
        self._next_seq_id += 1
        return count

    def _admit_alone(self, sequence: Sequence, budget: int) -> int:
        """Nothing runs and still no room: the hit's blocks lie scattered over too many pages."""
        sequence.alone = True
        self.cache.drop_cached()
        return self._admit(sequence, budget, busy=False)

    def _count_admission(self, sequence: Sequence, hit: Hit | None) -> None:
        if sequence.admitted:
            return
        sequence.admitted = True
        if hit is not None:
            sequence.num_cached_tokens = min(hit.num_units * self.cache.block_size, sequence.num_prompt_tokens)
        self.cache.count_outcome(
            hit,
            sequence.chain,
            num_tokens=len(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
        )

    def _restart_alone(self, sequence: Sequence) -> None:
        self._preempt(sequence)
        sequence.alone = True
        self.cache.drop_cached()

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; what it published stays cached, the rest is computed again."""
        self.preemptions["recompute"] += 1
        self._running.remove(sequence)
        self._release(sequence)
        sequence.leave()
        self._waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        self.cache.release(sequence.blocks)
        sequence.blocks = None
        self._finished_ids.append(sequence.seq_id)


def _collect_prompt_logprobs(sequence: Sequence, logprobs: list[TokenLogprobs]) -> None:
    if sequence.prompt_logprobs is None:
        sequence.prompt_logprobs = [None]
    sequence.prompt_logprobs += logprobs


def _take_token(sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
    """The sampled token is known from here on."""
    sequence.num_pending -= 1
    token_ids = sequence.token_ids
    token_ids.append(token_id)
    is_first = not sequence.has_output
    prompt_logprobs = None
    if is_first:
        sequence.has_output = True
        if sequence.request.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs or (None,))
    return SequenceOutput(
        request_id=sequence.request.request_id,
        token_id=token_id,
        position=len(token_ids) - 1 - sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        is_first=is_first,
        at_limit=len(token_ids) >= sequence.max_tokens_total,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
