"""Random kills from outside, in a cluster of stub workers and real routers: workers, ranks, routers and hosts.

A logical worker has a `StubWorker` for each router. It runs on a host, which has two workers. What is killed is replaced later.
Nothing that is asked here is a poison request, so every stream of a router that lives must be whole.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from tests.cluster.conftest import make_router, timings
from tests.cluster.stub_worker import StubDirectory, StubWorker
from transom_cluster.router.router import Router
from transom_core.config import FailoverConfig
from transom_core.contract import ErrorInfo, OutputEvent, Request, SamplingParams, WorkerLoad
from transom_core.errors import LossCause, WorkerLost

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NO_PAUSES = timings(first_reconnect_pause_s=0.0, longest_reconnect_pause_s=0.001, retry_s=0.001, cooldown_s=0.01)
NUM_ROUTERS, NUM_WORKERS, WORKERS_PER_HOST = 2, 4, 2
STREAMS_PER_ROUTER = 8
TURNS_PER_TOKEN = 6
RUNNING = WorkerLoad(max_num_seqs=4)

Victim = Literal["worker", "rank", "router", "host"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)


@dataclass
class LogicalWorker:
    """One worker, as each router sees it."""

    name: str
    host: int
    parts: list[StubWorker]
    is_dead: bool = False

    def kill(self, cause: LossCause) -> None:
        """End the worker for good."""
        self.is_dead = True
        for part in self.parts:
            part.kill(cause)

    def lose_ranks(self, cause: LossCause) -> None:
        """Lose all requests, and refuse others until `restart`."""
        lost = ErrorInfo.of(WorkerLost("The worker lost a rank.", loss_cause=cause, num_lost=self.num_running))
        for part in self.parts:
            part.admission_error = lost
            part.end_all(lost)

    def restart(self) -> None:
        """Take requests again."""
        for part in self.parts:
            part.admission_error = None

    @property
    def num_running(self) -> int:
        """The requests of all routers."""
        return sum(part.num_running for part in self.parts)


@dataclass
class Outcome:
    """What happened to the streams of the routers that lived, and what the routers counted."""

    whole: int = 0
    broken: list[str] = field(default_factory=list)
    stopped: float = 0  # as poison requests
    losses: float = 0


class KillSequence:
    """One cluster, its streams, and one to four kills; `run` says what became of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._names, self._hosts = itertools.count(), itertools.count()
        self._directories = [StubDirectory() for _ in range(NUM_ROUTERS)]
        self._workers: list[LogicalWorker] = []
        self._routers: list[Router] = []
        self._dead_routers: set[int] = set()
        self._later: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome:
        """Start streams, kill, replace, and wait for the streams."""
        while len(self._workers) < NUM_WORKERS:
            self._add_host()
        config = FailoverConfig(wait_s=600.0)
        self._routers = [
            make_router(directory=one, failover=config, timings=NO_PAUSES, routing_policy="least_tokens")
            for one in self._directories
        ]
        for router in self._routers:
            router.start()
        streams = [
            (number, asyncio.create_task(_read(router, f"{number}-{index}")))
            for number, router in enumerate(self._routers)
            for index in range(STREAMS_PER_ROUTER)
        ]
        for _ in range(self.rng.randint(1, 4)):
            await _turns(self.rng.randint(0, 25 * TURNS_PER_TOKEN))
            self._strike(self.rng.choices(VICTIMS, weights=[5, 5, 1, 2])[0])
        outcome = Outcome()
        for number, stream in streams:
            error = await stream
            if number not in self._dead_routers:
                outcome.whole += not error
                outcome.broken += [error] if error else []
        for router in self._routers:
            outcome.stopped += _counted(router, "transom_router_suspects_total", judgement="culprit")
            outcome.losses += sum(_samples(router, "transom_router_worker_losses_total"))
            await router.stop()
        await asyncio.gather(*self._later)
        return outcome

    def _strike(self, victim: Victim) -> None:
        alive = [worker for worker in self._workers if not worker.is_dead]
        if victim == "router":
            self._kill_router()
        elif alive:
            worker = self.rng.choice(alive)
            if victim == "worker":
                self._kill([worker], "unknown")
            elif victim == "host":
                self._kill([one for one in alive if one.host == worker.host], self.rng.choice(["host_lost", "unknown"]))
            else:
                worker.lose_ranks(self.rng.choice(["killed", "unknown"]))
                self._after_a_while(worker.restart)

    def _kill(self, victims: list[LogicalWorker], cause: LossCause) -> None:
        for worker in victims:
            worker.kill(cause)
        for worker in victims:
            self._after_a_while(partial(self._add_worker, worker.host))

    def _kill_router(self) -> None:
        living = [number for number in range(NUM_ROUTERS) if number not in self._dead_routers]
        if len(living) > 1:
            number = self.rng.choice(living)
            self._dead_routers.add(number)
            self._later.append(asyncio.create_task(self._routers[number].stop()))

    def _after_a_while(self, action) -> None:
        num_turns = self.rng.randint(0, 40 * TURNS_PER_TOKEN)

        async def act() -> None:
            await _turns(num_turns)
            action()

        self._later.append(asyncio.create_task(act()))

    def _add_host(self) -> None:
        host = next(self._hosts)
        for _ in range(WORKERS_PER_HOST):
            self._add_worker(host)

    def _add_worker(self, host: int) -> None:
        name = f"w{next(self._names)}"
        parts = [StubWorker(worker=name, num_turns=TURNS_PER_TOKEN, load=RUNNING) for _ in self._directories]
        self._workers.append(LogicalWorker(name, host, parts))
        for directory, part in zip(self._directories, parts, strict=True):
            directory.add(part)


async def _read(router: Router, name: str) -> str:
    """Read one stream; what is wrong with it, or nothing."""
    params = SamplingParams(max_tokens=26)
    request = Request(request_id=name, prompt_token_ids=(1, 2), params=params, seed=0)
    text, events = "", list[OutputEvent]()
    try:
        async with router.generate([request]) as output:
            while output.num_unfinished:
                events = [event for _, event in await output.next()]
                text += "".join(event.text for event in events)
    except Exception as error:
        return repr(error)
    if events and events[-1].error is not None:
        return events[-1].error.message
    return "" if text == LETTERS else text


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _samples(router: Router, name: str) -> Iterator[float]:
    for family in router.metrics.registry.collect():
        yield from (sample.value for sample in family.samples if sample.name == name)


def _counted(router: Router, name: str, **labels: str) -> float:
    value = router.metrics.registry.get_sample_value(name, {"model": "stub", "router": router.router_id, **labels})
    assert value is not None
    return value
