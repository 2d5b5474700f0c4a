"""A fleet of workers and routers in virtual time.

Routers learn of index, load and their requests' progress by messages as in a real cluster: each worker has a `RouterOutbox` for
each router, and a message takes `MESSAGE_S`. Of the output only first and last tokens are simulated, since the others would change
nothing but the freshness of the news that they carry: here routers know less than in a real cluster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import thread_time
from typing import Protocol

from routing_workers import FleetWorker, LoadTimer, Progress
from transom_cluster.routing.placer import Placer
from transom_core.config import RoutingPolicy
from transom_core.contract import OutputEvent, Request, Usage, WorkerInfo, WorkerMessage
from transom_worker.engine.router_outbox import RouterOutbox
from transom_worker.simulate.arrivals import RecordedArrivals
from transom_worker.simulate.workload import Workload

MESSAGE_S = 0.002  # between router and worker, one way


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
    """Ours, with the CPU time of each placement and of all bookkeeping together."""

    def __init__(self, policy: RoutingPolicy, infos: dict[str, WorkerInfo], seed: int) -> None:
        self.placer = Placer(policy, seed=seed)
        self._workers = list(infos)
        self.differences: list[int] = []  # predicted minus actual hit tokens
        self.placement_s: list[float] = []
        self.bookkeeping_s = 0.0
        for worker_id, info in infos.items():
            self.placer.add_worker(worker_id, info)

    def hear(self, worker_id: str, message: WorkerMessage) -> None:
        """Never a gap: nothing is lost here."""
        begin_s = thread_time()
        assert self.placer.update(worker_id, message)
        self.bookkeeping_s += thread_time() - begin_s

    def choose(self, request: Request) -> str:
        """Among all."""
        begin_s = thread_time()
        worker_id = self.placer.place(request, self._workers).worker_id
        self.placement_s.append(thread_time() - begin_s)
        return worker_id

    def begun(self, request_id: str, usage: Usage) -> None:
        """Compares."""
        difference = self.placer.first_event(request_id, usage)
        assert difference is not None
        self.differences.append(difference)

    def ended(self, request_id: str) -> None:
        """Forgets."""
        self.placer.ended(request_id)


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
    messages: int = 0  # to all routers


class FleetSimulation:
    """Serves one workload. Each request goes to the router that `router_of` says; by default to the routers in turn.

    `on_message` sees every message as it is sent: the number of the router, the worker, the time.
    """

    def __init__(
        self,
        workload: Workload,
        workers: Sequence[FleetWorker],
        routers: Sequence[Router],
        *,
        router_of: Callable[[int], int] | None = None,
        on_message: Callable[[int, str, WorkerMessage, float], None] | None = None,
    ) -> None:
        self._requests = workload.requests
        self._arrivals = RecordedArrivals(workload)
        self._workers = {worker.worker_id: worker for worker in workers}
        self._routers = routers
        self._router_of = router_of or (lambda index: index % len(routers))
        self._on_message = on_message
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._now_s = 0.0
        self._arrival_s: dict[str, float] = {}
        self._timers = {name: LoadTimer() for name in self._workers}
        self._outboxes = {name: [RouterOutbox(lambda: self._now_s) for _ in routers] for name in self._workers}
        self._wakes: dict[tuple[str, int], float] = {}  # by worker and router: when its outbox is looked at again
        self.totals = Totals(by_worker=dict.fromkeys(self._workers, 0))

    def run(self, until_s: float = math.inf) -> Totals:
        """Until every request is answered, or that moment."""
        for worker in self._workers.values():
            for number, outbox in enumerate(self._outboxes[worker.worker_id]):
                outbox.put(WorkerMessage(kv=worker.whole_index(), load=worker.load()))
                self._flush(worker.worker_id, number)
        # Heartbeats of idle workers go on for ever, but they bring no request.
        while self._arrival_s or self._arrivals.next_s() is not None:
            arrival_s = self._arrivals.next_s()
            now_s = min(arrival_s if arrival_s is not None else math.inf, self._events[0][0])
            if now_s > until_s:
                break
            self._now_s = now_s
            if now_s == arrival_s:
                for index in self._arrivals.due(now_s, idle=False):
                    self._arrive(index, now_s)
            else:
                heapq.heappop(self._events)[2](now_s)
        self.totals.virtual_s = self._now_s
        self.totals.prefill_tokens = sum(worker.prefill_tokens for worker in self._workers.values())
        self.totals.preemptions = sum(worker.num_preempted for worker in self._workers.values())
        return self.totals

    def _at(self, moment_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment_s, next(self._order), act))

    def _arrive(self, index: int, now_s: float) -> None:
        name = str(index)
        request = self._requests[index].as_request(name)
        self._arrival_s[name] = now_s
        worker = self._workers[self._routers[self._router_of(index)].choose(request)]
        self.totals.by_worker[worker.worker_id] += 1
        self._at(now_s + MESSAGE_S, lambda at_s: self._submit(worker, request, index, at_s))

    def _submit(self, worker: FleetWorker, request: Request, index: int, now_s: float) -> None:
        worker.submit(request, self._requests[index].answer, now_s)
        self._timers[worker.worker_id].taken.append(request.request_id)
        if not worker.is_busy:
            self._go_on(worker, now_s)

    def _go_on(self, worker: FleetWorker, now_s: float) -> None:
        end_s = worker.begin_step(now_s)
        if end_s is not None:
            self._at(end_s, lambda at_s: self._step_ended(worker, at_s))
        else:
            self._deliver(worker, [], now_s, is_idle=True)

    def _step_ended(self, worker: FleetWorker, now_s: float) -> None:
        self._deliver(worker, worker.end_step(now_s), now_s, is_idle=False)
        self._go_on(worker, now_s)

    def _deliver(self, worker: FleetWorker, progress: list[Progress], now_s: float, *, is_idle: bool) -> None:
        """Put what a step has brought into the outboxes, as replica and engine thread do."""
        name = worker.worker_id
        kv, taken, load = worker.take_update(), self._timers[name].take(now_s, progress, is_idle=is_idle), None
        if taken is not None:
            load = worker.load()
        if kv is None and load is None:
            return
        for number, outbox in enumerate(self._outboxes[name]):
            events = tuple(self._event(one) for one in progress if self._router_of(int(one.request_id)) == number)
            its_taken = tuple(one for one in taken or () if self._router_of(int(one)) == number)
            outbox.put(WorkerMessage(events=events, kv=kv, load=load, taken=its_taken))
            self._flush(name, number)

    def _event(self, progress: Progress) -> OutputEvent:
        usage = Usage(
            num_prompt_tokens=self._requests[int(progress.request_id)].num_prompt_tokens,
            num_output_tokens=1,
            num_cached_tokens=progress.num_cached_tokens,
            index_version=progress.index_version,
        )
        return OutputEvent(
            request_id=progress.request_id,
            position=0,
            finish_reason="length" if progress.is_last else None,
            usage=usage if progress.is_first else None,
        )

    def _flush(self, worker_id: str, number: int) -> None:
        """Send what is due to one router, and look again when the next message is due."""
        outbox, key = self._outboxes[worker_id][number], (worker_id, number)
        if outbox.due_s() <= self._now_s:
            message = outbox.take()
            self.totals.messages += 1
            if self._on_message is not None:
                self._on_message(number, worker_id, message, self._now_s)
            self._at(self._now_s + MESSAGE_S, lambda at_s: self._hear(number, worker_id, message, at_s))
        due_s = outbox.due_s()
        if due_s < self._wakes.get(key, math.inf):
            self._wakes[key] = due_s
            self._at(due_s, lambda at_s: self._wake(key, at_s))

    def _wake(self, key: tuple[str, int], now_s: float) -> None:
        if self._wakes.get(key) == now_s:
            del self._wakes[key]
            self._flush(*key)

    def _hear(self, number: int, worker_id: str, message: WorkerMessage, now_s: float) -> None:
        router = self._routers[number]
        router.hear(worker_id, message)
        for event in message.events:
            if event.usage is not None:
                self.totals.prompt_tokens += event.usage.num_prompt_tokens
                self.totals.cached_tokens += event.usage.num_cached_tokens
                self.totals.first_token_s.append(now_s - self._arrival_s[event.request_id])
                router.begun(event.request_id, event.usage)
            if event.finish_reason is not None:
                router.ended(event.request_id)
                del self._arrival_s[event.request_id]
                self._arrivals.answered(int(event.request_id), now_s)
