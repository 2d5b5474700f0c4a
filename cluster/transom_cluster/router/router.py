"""The router's core, independent of Ray and HTTP: a tokenizer, links to workers, and answers in flight."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any
from zlib import crc32

from transom_cluster.openai.errors import unknown_model
from transom_cluster.openai.to_contract import ModelLimits
from transom_cluster.router.in_flight_requests import Flight
from transom_cluster.router.model_limits import KnownLimits
from transom_cluster.router.output_stream import Answer
from transom_cluster.router.peers import NoPeers, RouterPeers
from transom_cluster.router.request_queue import WaitingRoom
from transom_cluster.router.router_state import read_state
from transom_cluster.router.worker_client import WorkerClient, WorkerDirectory
from transom_cluster.router.worker_connection import WorkerLink
from transom_cluster.router.worker_pool import WorkerPool
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.request_timeline import RequestLife, RequestLives
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.tracing import RouterTracing
from transom_worker.config import AutoscalingConfig, ServerConfig
from transom_worker.contract import Request
from transom_worker.errors import EngineDead, WorkerLost
from transom_worker.text.tokenizer import Tokenizer

DRAIN_S = 30.0

_STOPPING = "This router is being stopped; send the request again."
_NOT_READY = "The worker is not ready (starting, or being replaced); try again in a moment."


class Router:
    """What the routes work with. `start` and `stop` run on the event loop that serves.

    `drain_s` is how long running answers go on at a worker that disappears, and at a router that stops.
    """

    def __init__(
        self,
        *,
        workers: WorkerDirectory,
        tokenizer: Tokenizer,
        config: ServerConfig,
        router_id: str,
        engine_seed: int | None = None,
        drain_s: float = DRAIN_S,
        peers: RouterPeers | None = None,
        autoscaling: AutoscalingConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.engine_seed = engine_seed
        self.router_id = router_id
        self.peers = peers or NoPeers()
        self.metrics = RouterMetrics(router_id, model=config.served_model_name)
        self.links: dict[str, WorkerLink] = {}
        self.is_draining = False
        seed = crc32(router_id.encode())  # routers cast lots of their own
        placer = Placer(config.routing_policy, seed=seed, observer=self.metrics.routing)
        self._drain_s = drain_s
        self._limits = KnownLimits()
        self._wake_workers = workers.wake
        self._room = WaitingRoom(
            self.links, placer, config.failover, self.metrics, limits=self._limits, wake_workers=workers.wake
        )
        self._pool = WorkerPool(
            workers, router_id, links=self.links, listener=self._room, metrics=self.metrics, drain_s=drain_s
        )
        self.lives = RequestLives(router_id)
        self.tracing: RouterTracing | None = None
        if config.tracing is not None:
            self.tracing = RouterTracing(config.tracing, router_id, model=config.served_model_name)
        self._answers: dict[Answer, list[Flight]] = {}
        self._idle = asyncio.Event()
        self.metrics.watch(functools.partial(read_state, self.links, self._room, autoscaling))

    def metrics_text(self, openmetrics: bool) -> str:
        """This router's own page of metrics, in one of Prometheus' two formats."""
        return self.metrics.text(openmetrics=openmetrics)

    def request_timeline(self, request_id: str, client: str) -> dict[str, Any] | None:
        """This router's part of the life of a client's request; None if it does not know it (any more)."""
        return self.lives.life_of(request_id, client)

    def request_lines(self, client: str, state: str | None, limit: int) -> list[dict[str, Any]]:
        """A client's last requests here, in a line each."""
        return self.lives.lines(client, state, limit)

    def process_name(self) -> str:
        """This router among all processes of the cluster."""
        return f"router/{self.router_id}"

    def process_page(self, name: str, openmetrics: bool) -> str | None:
        """The same page for one that asks for a process by its name; None where that is another."""
        return self.metrics_text(openmetrics) if name == self.process_name() else None

    @property
    def clients(self) -> list[WorkerClient]:
        """All workers, for metrics."""
        return [link.client for link in self.links.values()]

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: a worker's stream is open, and the router is not being stopped."""
        return not self.is_draining and any(link.takes_requests for link in self.links.values())

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._room)

    @property
    def num_in_flight(self) -> int:
        """Requests that workers have."""
        return sum(len(link.in_flight) for link in self.links.values())

    @property
    def limits(self) -> ModelLimits:
        """The served model's limits; those of the last worker while there is none.

        Raises:
            EngineDead: no worker was ready so far.
        """
        if self._limits.now is None:
            raise EngineDead(_NOT_READY)
        return self._limits.now

    @property
    def known_limits(self) -> ModelLimits | None:
        """The same; None while no worker was ready."""
        return self._limits.now

    def check_model(self, name: str | None) -> None:
        """Raise HttpError (404) unless `name` is served here; None means the served one."""
        if name is not None and name != self.config.served_model_name:
            raise unknown_model(name, self.config.served_model_name)

    async def prepare(self, model: str | None) -> None:
        """For a request with a prompt: check its model's name, and wait until the model's limits are known.

        Raises:
            HttpError: 404, the model is not served here.  WorkerLost: there is no worker, or the router is being stopped.
        """
        self.check_model(model)
        if self.is_draining:
            raise WorkerLost(_STOPPING)
        wait_s = min(self.config.failover.wait_s, self.config.limits.request_timeout_s or math.inf)
        await self._limits.wait(wait_s, wake_workers=self._wake_workers)

    def start(self) -> None:
        """Connect to the workers."""
        self._pool.start()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; `/health` says so. What runs goes on."""
        self.is_draining = True

    async def stop(self) -> None:
        """Give running answers `drain_s`, end the others with an error, and disconnect."""
        self.begin_drain()
        if self._answers:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._drain_s)
        for flights in self._answers.values():
            left = [flight for flight in flights if not flight.has_ended]
            self._room.withdraw(left)
            for flight in left:
                flight.fail(WorkerLost(_STOPPING))
        await self._room.stop()
        await self._pool.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @contextlib.asynccontextmanager
    async def answer(self, requests: Sequence[Request], life: RequestLife | None = None) -> AsyncIterator[Answer]:
        """Submit requests; on leaving, for whatever reason, what has not ended is aborted at once.

        Raises:
            TransomError: a request was refused.
        """
        if self.is_draining:
            raise WorkerLost(_STOPPING)
        answer = Answer(requests, life)
        flights = self._answers[answer] = [Flight(answer, index, request) for index, request in enumerate(requests)]
        with self.lives.following(answer.life, flights):
            try:
                self._room.enter(flights)
                await answer.admitted()
                yield answer
            finally:
                self._room.withdraw(flights)
                del self._answers[answer]
                if not self._answers:
                    self._idle.set()
