"""A fleet of workers and routers in virtual time: real placers, outboxes, schedulers and caches; only the model is missing.

Routers learn of index, load and their requests' progress by messages as in a real cluster: each worker has a `RouterOutbox` for
each router, and a message takes `MESSAGE_S`. A worker runs one step at a time, whose duration the simulator's cost model says. Of
the output only first and last tokens are sent, since the others would change nothing but the freshness of the news that they carry:
here routers know less than in a real cluster.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import thread_time

from transom_cluster.routing.placer import Placer
from transom_core.config import RoutingPolicy, SchedulerConfig
from transom_core.contract import OutputEvent, Request, Usage, WorkerInfo, WorkerLoad, WorkerMessage
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.engine.engine_thread import LOAD_PERIOD_S
from transom_worker.engine.router_outbox import RouterOutbox
from transom_worker.engine.state_report import StepRates, worker_load
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan
from transom_worker.simulate.replay import Arrivals, StepCost, StubExecutor, VirtualClock
from transom_worker.simulate.workload import SimulatedRequest, Workload

BLOCK_SIZE = 16
MAX_MODEL_LEN = 131_072
MAX_NUM_SEQS = 64
NUM_BATCHED_TOKENS = 2_048
MESSAGE_S = 0.002  # between router and worker, one way


class Worker:
    """A scheduler and a cache, with one step in flight."""

    def __init__(self, worker_id: str, layout: ArenaLayout) -> None:
        self.worker_id = worker_id
        self._clock = VirtualClock()
        self._executor = StubExecutor()
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=NUM_BATCHED_TOKENS, max_waiting=100_000),
            KvCache(layout, block_size=BLOCK_SIZE, clock=self._clock),
            max_model_len=MAX_MODEL_LEN,
        )
        self.cache = self.scheduler.cache
        self.info = WorkerInfo(worker=worker_id, max_model_len=MAX_MODEL_LEN, vocab_size=2**31, cache=self.cache.shape)
        self.prefill_tokens = 0  # computed so far, those of preempted requests again
        self.taken: list[str] = []  # requests that the next load is the first to count
        self.plan: StepPlan | None = None  # of the running step
        self._simulated: dict[str, SimulatedRequest] = {}
        self._rates = StepRates()
        self._cost = StepCost()
        self._step_s = 0.0
        self._load_measured_s = -1.0

    def submit(self, request: Request, simulated: SimulatedRequest) -> None:
        """A request arrives."""
        self._simulated[request.request_id] = simulated
        self._executor.expect(request.request_id, simulated.answer)
        self.scheduler.add(request)
        self.taken.append(request.request_id)

    def begin_step(self, now_s: float) -> float | None:
        """When the step that begins now will end; None where there is nothing to do."""
        self._clock.now_s = now_s
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            return None
        self._step_s = self._cost.of(self.plan)
        self.prefill_tokens += self.plan.num_tokens
        return now_s + self._step_s

    def end_step(self, now_s: float) -> list[OutputEvent]:
        """End the step; the events of first and last tokens."""
        plan, events = self.plan, []
        assert plan is not None
        self._rates.stepped(plan.num_tokens, len(plan.seq_ids), self._step_s, now_s=now_s)
        for output in self.scheduler.receive(self._executor.answer(plan)):
            self.prefill_tokens -= not output.is_first  # decoded, not prefilled
            if output.is_first or output.at_limit:
                usage = Usage(
                    num_prompt_tokens=self._simulated[output.request_id].num_prompt_tokens,
                    num_output_tokens=1,
                    num_cached_tokens=output.num_cached_tokens,
                    index_version=output.index_version,
                )
                events.append(
                    OutputEvent(
                        request_id=output.request_id,
                        position=0,
                        finish_reason="length" if output.at_limit else None,
                        usage=usage if output.is_first else None,
                    )
                )
            if output.at_limit:
                self.scheduler.abort(output.request_id)
                self._executor.forget(output.request_id)
                del self._simulated[output.request_id]
        self.plan = None
        return events

    def news(self, now_s: float, events: Sequence[OutputEvent], *, is_idle: bool) -> WorkerMessage | None:
        """What has changed for routers; None if nothing. The load is measured as `EngineThread` decides it: when the worker falls
        idle, with events, and else every `LOAD_PERIOD_S`."""
        kv = self.cache.changes.take()
        if is_idle or events or now_s - self._load_measured_s > LOAD_PERIOD_S:
            self._load_measured_s = now_s
            taken, self.taken = tuple(self.taken), []
            return WorkerMessage(events=tuple(events), kv=kv, load=self.load(), taken=taken)
        return None if kv is None else WorkerMessage(kv=kv)

    def load(self) -> WorkerLoad:
        """The present load."""
        return worker_load(self.scheduler, self._rates)


class Router:
    """A placer, and the CPU time of each placement."""

    def __init__(self, policy: RoutingPolicy, infos: dict[str, WorkerInfo], seed: int) -> None:
        self._placer = Placer(policy, seed=seed)
        self._workers = list(infos)
        self.placement_s: list[float] = []
        for worker_id, info in infos.items():
            self._placer.add_worker(worker_id, info)

    def choose(self, request: Request) -> str:
        """The worker that takes a request."""
        begin_s = thread_time()
        worker_id = self._placer.place(request, self._workers).worker_id
        self.placement_s.append(thread_time() - begin_s)
        return worker_id

    def hear(self, worker_id: str, message: WorkerMessage) -> None:
        """A worker's message has arrived; none is ever lost here."""
        assert self._placer.update(worker_id, message)
        for event in message.events:
            if event.usage is not None:
                assert self._placer.first_event(event.request_id, event.usage) is not None
            if event.finish_reason is not None:
                self._placer.ended(event.request_id)


@dataclass
class Totals:
    """What a run came to."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    requests_by_worker: dict[str, int] = field(default_factory=dict)


class FleetSimulation:
    """Serves one workload, whose requests go to the routers in turn."""

    def __init__(self, workload: Workload, workers: Sequence[Worker], routers: Sequence[Router]) -> None:
        self._requests = workload.requests
        self._arrivals = Arrivals(workload)
        self._workers = {worker.worker_id: worker for worker in workers}
        self._routers = routers
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap: time, order, what happens
        self._order = count()
        self._now_s = 0.0
        self._arrival_s: dict[str, float] = {}  # of requests that are not answered
        self._outboxes = {name: [RouterOutbox(lambda: self._now_s) for _ in routers] for name in self._workers}
        self._wakes: dict[tuple[str, int], float] = {}  # by worker and router: when its outbox is looked at again
        self._totals = Totals(requests_by_worker=dict.fromkeys(self._workers, 0))

    def run(self) -> Totals:
        """Until every request is answered."""
        for name, worker in self._workers.items():
            for number, outbox in enumerate(self._outboxes[name]):
                outbox.put(WorkerMessage(kv=worker.cache.changes.whole(), load=worker.load()))
                self._flush(name, number)
        # Heartbeats of idle workers go on for ever, but they bring no request.
        while self._arrival_s or self._arrivals.next_s() is not None:
            arrival_s = self._arrivals.next_s()
            self._now_s = min(arrival_s if arrival_s is not None else math.inf, self._events[0][0])
            if self._now_s == arrival_s:
                for index in self._arrivals.due(self._now_s):
                    self._arrive(index)
            else:
                heapq.heappop(self._events)[2]()
        return self._totals

    def _at(self, moment_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment_s, next(self._order), act))

    def _router_of(self, request_id: str) -> int:
        return int(request_id) % len(self._routers)

    def _arrive(self, index: int) -> None:
        simulated, request_id = self._requests[index], str(index)
        request = simulated.as_request(request_id)
        self._arrival_s[request_id] = self._now_s
        worker = self._workers[self._routers[self._router_of(request_id)].choose(request)]
        self._totals.requests_by_worker[worker.worker_id] += 1
        self._at(self._now_s + MESSAGE_S, lambda: self._submit(worker, request, simulated))

    def _submit(self, worker: Worker, request: Request, simulated: SimulatedRequest) -> None:
        worker.submit(request, simulated)
        if worker.plan is None:
            self._go_on(worker)

    def _go_on(self, worker: Worker) -> None:
        end_s = worker.begin_step(self._now_s)
        if end_s is None:
            self._deliver(worker, [], is_idle=True)
        else:
            self._at(end_s, lambda: self._step_ended(worker))

    def _step_ended(self, worker: Worker) -> None:
        self._deliver(worker, worker.end_step(self._now_s), is_idle=False)
        self._go_on(worker)

    def _deliver(self, worker: Worker, events: list[OutputEvent], *, is_idle: bool) -> None:
        """Put what a step has brought into the outboxes; each router gets its own requests' events."""
        news = worker.news(self._now_s, events, is_idle=is_idle)
        if news is None:
            return
        for number, outbox in enumerate(self._outboxes[worker.worker_id]):
            own = tuple(event for event in news.events if self._router_of(event.request_id) == number)
            taken = tuple(one for one in news.taken if self._router_of(one) == number)
            outbox.put(WorkerMessage(events=own, kv=news.kv, load=news.load, taken=taken))
            self._flush(worker.worker_id, number)

    def _flush(self, worker_id: str, number: int) -> None:
        """Send what is due to one router, and look again when the next message is due."""
        outbox, key = self._outboxes[worker_id][number], (worker_id, number)
        if outbox.due_s() <= self._now_s:
            message = outbox.take()
            self._at(self._now_s + MESSAGE_S, lambda: self._hear(number, worker_id, message))
        due_s = outbox.due_s()
        if due_s < self._wakes.get(key, math.inf):
            self._wakes[key] = due_s
            self._at(due_s, lambda: self._wake(key, due_s))

    def _wake(self, key: tuple[str, int], due_s: float) -> None:
        if self._wakes.get(key) == due_s:
            del self._wakes[key]
            self._flush(*key)

    def _hear(self, number: int, worker_id: str, message: WorkerMessage) -> None:
        self._routers[number].hear(worker_id, message)
        for event in message.events:
            if event.usage is not None:
                self._totals.prompt_tokens += event.usage.num_prompt_tokens
                self._totals.cached_tokens += event.usage.num_cached_tokens
                self._totals.first_token_s.append(self._now_s - self._arrival_s[event.request_id])
            if event.finish_reason is not None:
                del self._arrival_s[event.request_id]
                self._arrivals.answered(int(event.request_id), self._now_s)
