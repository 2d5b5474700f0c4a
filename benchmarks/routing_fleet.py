"""Workers and routers in virtual time: real schedulers, caches and placers; a step takes what the simulator's cost model says."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from transom_cluster.routing.placer import Placer
from transom_worker.config import RoutingPolicy, SchedulerConfig
from transom_worker.contract import Request, Usage, WorkerInfo, WorkerMessage
from transom_worker.engine.state_report import worker_load
from transom_worker.engine.step_rates import StepRates
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan
from transom_worker.simulate.arrivals import RecordedArrivals
from transom_worker.simulate.stub_executor import StubExecutor
from transom_worker.simulate.virtual_time import StepCost, VirtualClock
from transom_worker.simulate.workload import Workload

MESSAGE_S = 0.002  # between router and worker, one way
LOAD_PERIOD_S = 0.05
BLOCK_SIZE = 16
MAX_MODEL_LEN = 131_072


class Router(Protocol):
    """Whatever chooses workers: ours, or a model of another."""

    def hear(self, worker_id: str, message: WorkerMessage) -> None:
        """A worker's message has arrived."""

    def choose(self, request: Request) -> str:
        """Which worker takes it."""

    def begun(self, request_id: str, usage: Usage) -> None:
        """Its first token has arrived."""

    def ended(self, request_id: str) -> None:
        """Its last one has."""


class PlacerRouter:
    """Ours."""

    def __init__(self, policy: RoutingPolicy, infos: dict[str, WorkerInfo], seed: int) -> None:
        self._placer = Placer(policy, seed=seed)
        self._workers = list(infos)
        self.differences: list[int] = []  # predicted minus actual hit tokens
        for worker_id, info in infos.items():
            self._placer.add_worker(worker_id, info)

    def hear(self, worker_id: str, message: WorkerMessage) -> None:
        """Never a gap: nothing is lost here."""
        assert self._placer.update(worker_id, message)

    def choose(self, request: Request) -> str:
        """Among all."""
        return self._placer.place(request, self._workers).worker_id

    def begun(self, request_id: str, usage: Usage) -> None:
        """Compares."""
        difference = self._placer.first_event(request_id, usage)
        assert difference is not None
        self.differences.append(difference)

    def ended(self, request_id: str) -> None:
        """Forgets."""
        self._placer.ended(request_id)


@dataclass
class Totals:
    """What a run came to."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0  # computed, preempted ones again
    first_token_s: list[float] = field(default_factory=list)
    by_worker: dict[str, int] = field(default_factory=dict)  # requests
    virtual_s: float = 0.0
    preemptions: int = 0


class Worker:
    """One worker: one step in flight, load told as the engine's thread tells it."""

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
        self.plan: StepPlan | None = None
        self.num_computed = 0
        self.rates = StepRates()
        self._cost = cost
        self._step_s = 0.0
        self._told_s = -1.0

    def begin_step(self, now_s: float) -> float | None:
        """When the step that begins now will end; None if there is nothing to do."""
        self.clock.now_s = now_s
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            return None
        self._step_s = self._cost.of(self.plan)
        self.num_computed += self.plan.num_tokens
        return now_s + self._step_s

    def message(self, now_s: float, *, rests: bool) -> WorkerMessage:
        """What changed of index and load."""
        load = None
        if rests or now_s - self._told_s > LOAD_PERIOD_S:
            load, self._told_s = worker_load(self.scheduler, self.rates), now_s
        return WorkerMessage(kv=self.scheduler.cache.take_update(), load=load)

    def measure(self, plan: StepPlan) -> None:
        """A step has ended."""
        self.rates.stepped(plan.num_tokens, len(plan.seq_ids), self._step_s)


class FleetSimulation:
    """Serves one workload; requests go to the routers in turn."""

    def __init__(self, workload: Workload, workers: dict[str, Worker], routers: list[Router]) -> None:
        self._requests = workload.requests
        self._arrivals = RecordedArrivals(workload)
        self._workers = workers
        self._routers = routers
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._arrival_s: dict[str, float] = {}
        self._begun: set[str] = set()
        self.totals = Totals(by_worker=dict.fromkeys(workers, 0))

    def run(self) -> Totals:
        """Until every request is answered."""
        for worker in self._workers.values():
            whole = WorkerMessage(kv=worker.scheduler.cache.whole_index(), load=worker.message(0.0, rests=True).load)
            for router in self._routers:
                router.hear(worker.worker_id, whole)
        while True:
            arrival_s = self._arrivals.next_s()
            if arrival_s is not None and (not self._events or arrival_s <= self._events[0][0]):
                for index in self._arrivals.due(arrival_s, idle=False):
                    self._arrive(index, arrival_s)
            elif self._events:
                now_s, _, act = heapq.heappop(self._events)
                act(now_s)
                self.totals.virtual_s = now_s
            else:
                break
        workers = self._workers.values()
        self.totals.prefill_tokens += sum(worker.num_computed for worker in workers)
        self.totals.preemptions = sum(sum(worker.scheduler.preemptions.values()) for worker in workers)
        return self.totals

    def _at(self, moment_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment_s, next(self._order), act))

    def _arrive(self, index: int, now_s: float) -> None:
        name = str(index)
        request = self._requests[index].as_request(name)
        self._arrival_s[name] = now_s
        worker = self._workers[self._router(name).choose(request)]
        self.totals.by_worker[worker.worker_id] += 1
        self._at(now_s + MESSAGE_S, lambda at_s: self._submit(worker, request, index, at_s))

    def _router(self, name: str) -> Router:
        return self._routers[int(name) % len(self._routers)]

    def _submit(self, worker: Worker, request: Request, index: int, now_s: float) -> None:
        worker.executor.expect(request.request_id, self._requests[index].answer)
        worker.scheduler.add(request)
        if worker.plan is None:
            self._go_on(worker, now_s)

    def _go_on(self, worker: Worker, now_s: float) -> None:
        end_s = worker.begin_step(now_s)
        if end_s is not None:
            self._at(end_s, lambda at_s: self._step_ended(worker, at_s))
        elif not worker.scheduler.has_work:
            self._tell(worker, now_s, rests=True)

    def _step_ended(self, worker: Worker, now_s: float) -> None:
        plan = worker.plan
        assert plan is not None
        worker.measure(plan)
        for output in worker.scheduler.receive(worker.executor.answer(plan)):
            name = output.request_id
            self.totals.prefill_tokens -= not output.is_first  # decoded, not prefilled
            if output.is_first:
                self._first(name, output.num_cached_tokens, output.index_version, now_s + MESSAGE_S)
            if output.at_limit:
                worker.scheduler.finish(name)
                worker.executor.forget(name)
                self._at(now_s + MESSAGE_S, lambda at_s, name=name: self._ended(name, at_s))  # type: ignore[misc]
        self._tell(worker, now_s, rests=False)
        worker.plan = None
        self._go_on(worker, now_s)

    def _first(self, name: str, num_cached: int, version: int, now_s: float) -> None:
        num_prompt = self._requests[int(name)].num_prompt_tokens
        self.totals.prompt_tokens += num_prompt
        self.totals.cached_tokens += num_cached
        self.totals.first_token_s.append(now_s - self._arrival_s[name])
        usage = Usage(
            num_prompt_tokens=num_prompt, num_output_tokens=1, num_cached_tokens=num_cached, index_version=version
        )
        self._at(now_s, lambda _: self._router(name).begun(name, usage))

    def _ended(self, name: str, now_s: float) -> None:
        self._router(name).ended(name)
        self._arrivals.answered(int(name), now_s)

    def _tell(self, worker: Worker, now_s: float, *, rests: bool) -> None:
        message = worker.message(now_s, rests=rests)
        if message.kv is None and message.load is None:
            return
        for router in self._routers:
            self._at(now_s + MESSAGE_S, lambda _, router=router: router.hear(worker.worker_id, message))  # type: ignore[misc]
