"""Workers of a fleet in virtual time: `ScheduledWorker` has a real scheduler and cache, `ModelWorker` a cheaper model of both.

Both serve requests in steps whose duration the simulator's cost model says, and measure and report their load as an engine's thread
does. `ModelWorker` is for fleets of hundreds of workers: its cache is one full-attention group with the least recently used block
evicted first, its queue is first come, first served, and the blocks of running requests may be evicted.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from transom_core.config import SchedulerConfig
from transom_core.contract import Request, WorkerInfo, WorkerLoad
from transom_core.contract.kv_events import CacheShape, KvRun, KvUpdate
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.engine.engine_thread import LOAD_PERIOD_S
from transom_worker.engine.state_report import worker_load
from transom_worker.engine.step_rates import StepRates
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan
from transom_worker.simulate.stub_executor import StubExecutor
from transom_worker.simulate.virtual_time import StepCost, VirtualClock
from transom_worker.simulate.workload import Run

BLOCK_SIZE = 16
MAX_MODEL_LEN = 131_072


class Progress(NamedTuple):
    """A request's first token or its end; both at once where it has one token."""

    request_id: str
    is_first: bool
    is_last: bool
    num_cached_tokens: int
    index_version: int


class FleetWorker(Protocol):
    """One worker of a fleet. A step runs from `begin_step` to `end_step`; `is_busy` between them."""

    worker_id: str
    info: WorkerInfo
    is_busy: bool
    prefill_tokens: int  # computed so far, those of preempted requests again
    num_preempted: int

    def submit(self, request: Request, answer: Run, now_s: float) -> None:
        """A request arrives."""

    def begin_step(self, now_s: float) -> float | None:
        """When the step that begins now will end; None where there is nothing to do."""

    def end_step(self, now_s: float) -> list[Progress]:
        """End the step."""

    def whole_index(self) -> KvUpdate:
        """The whole prefix index."""

    def take_update(self) -> KvUpdate | None:
        """The changes of the prefix index since the last call."""

    def load(self) -> WorkerLoad:
        """The present load."""


@dataclass
class LoadTimer:
    """Whether the load is measured after a step: as `EngineThread` decides it."""

    measured_s: float = -1.0
    taken: list[str] = field(default_factory=list)

    def take(self, now_s: float, progress: list[Progress], *, is_idle: bool) -> tuple[str, ...] | None:
        """The requests that the load counts first, where it is to be measured now; otherwise None."""
        if not (is_idle or progress or now_s - self.measured_s > LOAD_PERIOD_S):
            return None
        self.measured_s = now_s
        taken, self.taken = tuple(self.taken), []
        return taken


class ScheduledWorker:
    """A real scheduler and cache, with one step in flight."""

    def __init__(self, worker_id: str, layout: ArenaLayout, *, cost: StepCost, max_num_seqs: int, num_batched: int):
        self.worker_id = worker_id
        self.clock = VirtualClock()
        self.executor = StubExecutor()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_batched, max_waiting=100_000),
            layout,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            clock=self.clock,
        )
        cache = self.scheduler.cache
        self.info = WorkerInfo(worker=worker_id, max_model_len=MAX_MODEL_LEN, vocab_size=2**31, cache=cache.shape)
        self.prefill_tokens = 0
        self._plan: StepPlan | None = None
        self._rates = StepRates()
        self._cost = cost
        self._step_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step runs."""
        return self._plan is not None

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return sum(self.scheduler.work.preemptions.values())

    def submit(self, request: Request, answer: Run, now_s: float) -> None:
        """A request arrives."""
        self.executor.expect(request.request_id, answer)
        self.scheduler.add(request)

    def begin_step(self, now_s: float) -> float | None:
        """When the step that begins now will end; None where there is nothing to do."""
        self.clock.now_s = now_s
        self._plan = self.scheduler.schedule()
        if self._plan is None:
            return None
        self._step_s = self._cost.of(self._plan)
        self.prefill_tokens += self._plan.num_tokens
        return now_s + self._step_s

    def end_step(self, now_s: float) -> list[Progress]:
        """End the step."""
        plan, progress = self._plan, []
        assert plan is not None
        self._rates.stepped(plan.num_tokens, len(plan.seq_ids), self._step_s, now_s=now_s)
        for output in self.scheduler.receive(self.executor.answer(plan)):
            name = output.request_id
            self.prefill_tokens -= not output.is_first  # decoded, not prefilled
            if output.is_first or output.at_limit:
                progress.append(
                    Progress(name, output.is_first, output.at_limit, output.num_cached_tokens, output.index_version)
                )
            if output.at_limit:
                self.scheduler.abort(name)
                self.executor.forget(name)
        self._plan = None
        return progress

    def whole_index(self) -> KvUpdate:
        """The whole prefix index."""
        return self.scheduler.cache.changes.whole()

    def take_update(self) -> KvUpdate | None:
        """The changes of the prefix index since the last call."""
        return self.scheduler.cache.changes.take()

    def load(self) -> WorkerLoad:
        """The present load."""
        return worker_load(self.scheduler, self._rates)


@dataclass(slots=True)
class _Sequence:
    request_id: str
    chain: list[bytes]
    tokens: tuple[int, ...]
    answer: Run
    num_computed: int = 0
    num_cached: int = 0
    version: int = 0
    is_scheduled: bool = False


class ModelWorker:
    """A cache of blocks with the least recently used evicted first, and a first-come, first-served queue of prompts."""

    def __init__(
        self,
        worker_id: str,
        *,
        capacity_tokens: int,
        cost: StepCost,
        max_num_seqs: int = 64,
        num_batched: int = 2_048,
        is_full: bool = False,
    ) -> None:
        """`is_full`: the cache begins full of blocks that no request of the simulation finds."""
        self.worker_id = worker_id
        group = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=BLOCK_SIZE)
        shape = CacheShape(groups=(group,), block_size=BLOCK_SIZE, window_repair=True, enable_prefix_caching=True)
        self.info = WorkerInfo(worker=worker_id, max_model_len=MAX_MODEL_LEN, vocab_size=2**31, cache=shape)
        self.is_busy = False
        self.prefill_tokens = 0
        self.num_preempted = 0
        self._capacity_blocks = capacity_tokens // BLOCK_SIZE
        self._cost = cost
        self._max_num_seqs = max_num_seqs
        self._num_batched = num_batched
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        if is_full:
            rng = random.Random(worker_id)
            self._cached.update((rng.randbytes(32), None) for _ in range(self._capacity_blocks))
        self._version = 0
        self._taken_version = 0
        self._runs: list[KvRun] = []
        self._queue: deque[_Sequence] = deque()  # prompts that are not computed, the running one first
        self._waiting_tokens = 0
        self._running: list[tuple[int, int, _Sequence]] = []  # a heap by the step of the last token
        self._running_blocks = 0
        self._step = 0
        self._num_started = 0
        self._chunks: list[tuple[_Sequence, int]] = []  # of the running step
        self._step_s = 0.0
        self._rates = StepRates()

    def submit(self, request: Request, answer: Run, now_s: float) -> None:
        """A request arrives."""
        chain: list[bytes] = []
        tokens = request.prompt_token_ids
        extend_chain(chain, chain_root(BLOCK_SIZE), tokens, BLOCK_SIZE)
        self._queue.append(_Sequence(request.request_id, chain, tokens, answer))
        self._waiting_tokens += len(tokens)

    def begin_step(self, now_s: float) -> float | None:
        """When the step that begins now will end; None where there is nothing to do."""
        if not self._queue and not self._running:
            return None
        num_tokens = len(self._running)
        budget, free = self._num_batched - num_tokens, self._max_num_seqs - num_tokens
        for sequence in self._queue:
            if budget <= 0 or free <= 0:
                break
            if not sequence.is_scheduled:
                self._look_up(sequence)
            chunk = min(budget, len(sequence.tokens) - sequence.num_computed)
            self._chunks.append((sequence, chunk))
            budget -= chunk
            free -= 1
            num_tokens += chunk
        self._step_s = self._cost.step_s + self._cost.token_s * num_tokens
        self.is_busy = True
        return now_s + self._step_s

    def end_step(self, now_s: float) -> list[Progress]:
        """End the step."""
        self._step += 1
        num_seqs = len(self._running) + len(self._chunks)
        num_prefilled = sum(chunk for _, chunk in self._chunks)
        self._rates.stepped(len(self._running) + num_prefilled, num_seqs, self._step_s, now_s=now_s)
        self.prefill_tokens += num_prefilled
        self._waiting_tokens -= num_prefilled
        progress = [self._end() for _ in range(len(self._running)) if self._running[0][0] <= self._step]
        for sequence, chunk in self._chunks:
            begin = sequence.num_computed // BLOCK_SIZE
            sequence.num_computed += chunk
            self._publish(sequence.chain[begin : sequence.num_computed // BLOCK_SIZE])
            if sequence.num_computed == len(sequence.tokens):
                self._queue.popleft()
                progress.append(self._begin_answer(sequence))
        self._chunks = []
        self._evict()
        self.is_busy = False
        return progress

    def whole_index(self) -> KvUpdate:
        """The whole prefix index."""
        runs = (KvRun("added", 0, tuple(self._cached)),)
        return KvUpdate(after=self._version, version=self._version, runs=runs, whole=True)

    def take_update(self) -> KvUpdate | None:
        """The changes of the prefix index since the last call."""
        if self._taken_version == self._version:
            return None
        update = KvUpdate(after=self._taken_version, version=self._version, runs=tuple(self._runs))
        self._runs, self._taken_version = [], self._version
        return update

    def load(self) -> WorkerLoad:
        """The present load."""
        num_partial = len(self._queue) > 0 and self._queue[0].is_scheduled
        used_blocks = self._running_blocks + sum(len(sequence.chain) for sequence, _ in self._chunks)
        return WorkerLoad(
            num_running=len(self._running) + num_partial,
            num_waiting=len(self._queue) - num_partial,
            max_num_seqs=self._max_num_seqs,
            waiting_tokens=self._waiting_tokens,
            used_share=min(1.0, used_blocks / self._capacity_blocks),
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
        )

    def _look_up(self, sequence: _Sequence) -> None:
        """Take the longest cached prefix; at least one token is left to compute."""
        num_hit, most = 0, (len(sequence.tokens) - 1) // BLOCK_SIZE
        for digest in sequence.chain[:most]:
            if digest not in self._cached:
                break
            self._cached.move_to_end(digest)
            num_hit += 1
        sequence.is_scheduled = True
        sequence.num_computed = sequence.num_cached = num_hit * BLOCK_SIZE
        sequence.version = self._version
        self._waiting_tokens -= sequence.num_cached

    def _begin_answer(self, sequence: _Sequence) -> Progress:
        is_last = sequence.answer.num_tokens <= 1
        if not is_last:
            self._num_started += 1
            self._running_blocks += len(sequence.chain)
            heappush(self._running, (self._step + sequence.answer.num_tokens - 1, self._num_started, sequence))
        return Progress(sequence.request_id, True, is_last, sequence.num_cached, sequence.version)

    def _end(self) -> Progress:
        sequence = heappop(self._running)[2]
        self._running_blocks -= len(sequence.chain)
        first, count = sequence.answer
        num_blocks = len(sequence.chain)
        tokens = (*sequence.tokens, *range(first, first + count))
        extend_chain(sequence.chain, chain_root(BLOCK_SIZE), tokens, BLOCK_SIZE)
        self._publish(sequence.chain[num_blocks:])
        return Progress(sequence.request_id, False, True, sequence.num_cached, sequence.version)

    def _publish(self, digests: list[bytes]) -> None:
        new = tuple(digest for digest in digests if digest not in self._cached)
        for digest in digests:
            self._cached[digest] = None
            self._cached.move_to_end(digest)
        self._change("added", new)

    def _evict(self) -> None:
        num_evicted = max(0, len(self._cached) - self._capacity_blocks)
        self._change("removed", tuple(self._cached.popitem(last=False)[0] for _ in range(num_evicted)))

    def _change(self, action: str, digests: tuple[bytes, ...]) -> None:
        if digests:
            self._runs.append(KvRun(action, 0, digests))  # type: ignore[arg-type]
            self._version += len(digests)
