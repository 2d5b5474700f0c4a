"""The router's core, independent of Ray and HTTP: a tokenizer, connections to workers, and answers in flight."""

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
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.model_limits import ModelLimitsTracker
from transom_cluster.router.output_stream import OutputStream
from transom_cluster.router.peers import NoPeers, RouterPeers
from transom_cluster.router.request_queue import RequestQueue
from transom_cluster.router.router_state import read_state
from transom_cluster.router.worker_client import WorkerClient, WorkerDirectory
from transom_cluster.router.worker_connection import WorkerConnection
from transom_cluster.router.worker_pool import WorkerPool
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.request_timeline import RequestTimeline, RequestTimelines
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
        self.connections: dict[str, WorkerConnection] = {}
        self.is_draining = False
        seed = crc32(router_id.encode())  # routers cast lots of their own
        placer = Placer(config.routing_policy, seed=seed, observer=self.metrics.routing)
        self._drain_s = drain_s
        self._limits = ModelLimitsTracker()
        self._wake_workers = workers.wake
        self._queue = RequestQueue(
            self.connections, placer, config.failover, self.metrics, limits=self._limits, wake_workers=workers.wake
        )
        self._pool = WorkerPool(
            workers,
            router_id,
            connections=self.connections,
            listener=self._queue,
            metrics=self.metrics,
            drain_s=drain_s,
        )
        self.timelines = RequestTimelines(router_id)
        self.tracing: RouterTracing | None = None
        if config.tracing is not None:
            self.tracing = RouterTracing(config.tracing, router_id, model=config.served_model_name)
        self._running: dict[OutputStream, list[InFlightRequest]] = {}
        self._idle = asyncio.Event()
        self.metrics.watch(functools.partial(read_state, self.connections, self._queue, autoscaling))

    def metrics_text(self, openmetrics: bool) -> str:
        """This router's own page of metrics, in one of Prometheus' two formats."""
        return self.metrics.text(openmetrics=openmetrics)

    def request_timeline(self, request_id: str, client: str) -> dict[str, Any] | None:
        """This router's part of the timeline of a client's request; None if it does not know it (any more)."""
        return self.timelines.find(request_id, client)

    def request_lines(self, client: str, state: str | None, limit: int) -> list[dict[str, Any]]:
        """A client's last requests here, in a line each."""
        return self.timelines.lines(client, state, limit)

    def process_name(self) -> str:
        """This router among all processes of the cluster."""
        return f"router/{self.router_id}"

    def process_page(self, name: str, openmetrics: bool) -> str | None:
        """The same page for one that asks for a process by its name; None where that is another."""
        return self.metrics_text(openmetrics) if name == self.process_name() else None

    @property
    def clients(self) -> list[WorkerClient]:
        """All workers, for metrics."""
        return [connection.client for connection in self.connections.values()]

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: a worker's stream is open, and the router is not being stopped."""
        return not self.is_draining and any(connection.takes_requests for connection in self.connections.values())

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Requests that workers have."""
        return sum(len(connection.in_flight) for connection in self.connections.values())

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
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._drain_s)
        for requests in self._running.values():
            left = [request for request in requests if not request.has_ended]
            self._queue.withdraw(left)
            for request in left:
                request.fail(WorkerLost(_STOPPING))
        await self._queue.stop()
        await self._pool.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @contextlib.asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], timeline: RequestTimeline | None = None
    ) -> AsyncIterator[OutputStream]:
        """Submit requests; on leaving, for whatever reason, what has not ended is aborted at once.

        Raises:
            TransomError: a request was refused.
        """
        if self.is_draining:
            raise WorkerLost(_STOPPING)
        output = OutputStream(requests, timeline)
        in_flight = self._running[output] = [
            InFlightRequest(output, index, request) for index, request in enumerate(requests)
        ]
        with self.timelines.following(output.timeline, in_flight):
            try:
                self._queue.enter(in_flight)
                await output.admitted()
                yield output
            finally:
                self._queue.withdraw(in_flight)
                del self._running[output]
                if not self._running:
                    self._idle.set()
