"""Continuous batching: requests in, a plan for each step, and what its result means for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from transom_worker.config import SchedulerConfig
from transom_worker.contract import Request
from transom_worker.errors import Overloaded, RequestError
from transom_worker.kvcache.eviction import EvictionPolicy
from transom_worker.kvcache.hashing import chain_root
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.queue import virtual_arrival_s
from transom_worker.scheduling.request_validation import check_supported, length_limit
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.scheduling.step_planner import PlannedStep, StepPlanner
from transom_worker.scheduling.work_counts import WorkCounts


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
        window_repair: bool = True,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.cache = KvCache(
            layout,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            window_repair=window_repair,
            policy=policy,
            clock=clock,
        )
        self.work = WorkCounts()
        self.admission = AdmissionControl(self.cache, self.work)
        self._planner = StepPlanner(config, layout, self.admission, self.work)
        self._by_request: dict[str, Sequence] = {}
        self._in_flight: deque[PlannedStep] = deque()
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step unanswered."""
        return bool(self._by_request) or bool(self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.admission.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones with them, and those that wait for what others compute."""
        return self.admission.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._in_flight)

    @property
    def preemptions(self) -> dict[str, int]:
        """Preemptions since start, by mode."""
        return {"recompute": self.work.num_preemptions}

    @property
    def preempted_tokens(self) -> dict[str, int]:
        """Tokens that preemptions threw away, by mode."""
        return {"recompute": self.work.preempted_tokens}

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence, up to the model's length, that the KV pool can hold alone."""
        return self.cache.capacity.longest_tokens(self.max_model_len)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before every request has its next one; what the cache will spare those that wait is not known yet,
        unless they follow others."""
        waiting = sum(sequence.reserved_tokens or len(sequence.token_ids) for sequence in self.admission.all_waiting)
        return waiting + sum(max(0, sequence.num_ready - 1) for sequence in self.admission.running)

    def listen(self, listener: SchedulerListener) -> None:
        """Tell this one as well, from now on, what becomes of requests."""
        self.admission.listeners.append(listener)

    def sequences_with_blocks(self) -> list[Sequence]:
        """All sequences that hold blocks: those that run, and those that have ended while a step in flight computes them."""
        ended = {
            sequence.seq_id: sequence
            for step in self._in_flight
            for sequence in step.rows
            if sequence.status is SequenceStatus.FINISHED and sequence.blocks is not None
        }
        return [*self.admission.running, *ended.values()]

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
        ahead = self.num_waiting + len(self.admission.running) - self.config.max_num_seqs
        if ahead >= self.config.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} requests are waiting and the limit is {self.config.max_waiting}; try again later."
            )
        self._num_arrived += 1
        sequence = Sequence(
            request=request,
            key=(virtual_arrival_s(request, self.config), self._num_arrived),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens_total=limit,
            root=chain_root(self.cache.block_size, cache_salt=request.cache_salt, adapter=request.adapter),
            token_ids=[*request.prompt_token_ids, *request.resumed_output_ids],
        )
        self._by_request[request.request_id] = sequence
        self.admission.enqueue(sequence)
        for listener in self.admission.listeners:
            listener.queued(sequence, num_ahead=self.admission.num_before(sequence))

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it stands; whether there was one. Blocks of a step in flight go when it has answered."""
        sequence = self._by_request.pop(request_id, None)
        if sequence is None:
            return False
        self.admission.drop(sequence)
        return True

    def finish(self, request_id: str) -> None:
        """The engine saw a stop: a token in flight is discarded with its slot. Unknown ids are ignored."""
        self.abort(request_id)

    # Steps

    def schedule(self) -> StepPlan | None:
        """The next plan; None if nothing can be computed now, or `steps_in_flight` plans are unanswered."""
        if len(self._in_flight) >= self.config.steps_in_flight:
            return None
        step = self._planner.plan(steps_in_flight=len(self._in_flight))
        if step is None:
            return None
        self._in_flight.append(step)
        return step.plan

    def receive(self, result: StepResult) -> list[SequenceOutput]:
        """Take the oldest plan's result: publish and free by it, and return its new tokens in row order."""
        step = self._in_flight.popleft()
        plan = step.plan
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} where step {plan.step_id} was due")
        outputs = []
        sample = 0
        rows = zip(step.rows, plan.start, plan.count, plan.sample, strict=True)
        for row, (sequence, start, count, samples) in enumerate(rows):
            processed = start + count
            sequence.num_in_flight -= 1
            if sequence.status is SequenceStatus.FINISHED:  # it may have computed a token whose id was discarded
                processed = min(processed, len(sequence.token_ids))
            blocks = sequence.blocks
            assert blocks is not None
            if processed >= blocks.next_event:
                self.cache.advance(blocks, sequence.token_ids, processed)
                self.admission.published(sequence)
            else:
                blocks.processed = processed
            if sequence.status is not SequenceStatus.FINISHED:
                if result.prompt_logprobs and row in result.prompt_logprobs:
                    sequence.take_prompt_logprobs(result.prompt_logprobs[row])
                if samples:
                    logprobs = result.logprobs[sample] if result.logprobs else None
                    outputs.append(sequence.take_token(result.sampled_ids[sample], logprobs))
            if sequence.status is not SequenceStatus.RUNNING and not sequence.num_in_flight:
                self.admission.settle(sequence)
            sample += samples
        return outputs

    def fail_in_flight(self) -> list[str]:
        """A step raised: forget all unanswered plans and drop their requests; returns the ids of those, for an error."""
        failed = []
        moved = any(step.plan.copy_group for step in self._in_flight)
        while self._in_flight:
            step = self._in_flight.popleft()
            self.admission.finished_ids += step.plan.finished  # ranks may not have seen them
            for sequence in step.rows:
                sequence.num_in_flight -= 1
                if sequence.num_in_flight:
                    continue
                was_done = sequence.status is SequenceStatus.FINISHED
                if sequence.status is not SequenceStatus.RUNNING:
                    self.admission.settle(sequence)
                if not was_done:
                    self.abort(sequence.request.request_id)
                    failed.append(sequence.request.request_id)
        if moved:  # nobody knows which of the blocks that were to be copied hold their contents
            self.admission.preempt_all()
        return failed

    def reset(self) -> None:
        """The ranks are new ones: drop every request, plan and block. What ranks were to be told is of no use any more."""
        self.fail_in_flight()
        for request_id in list(self._by_request):
            self.abort(request_id)
        self.cache.evict_all()
        self.cache.take_copies()
        self.admission.finished_ids = []
