"""Workers with real engines that are lost after a number of output events, and a router of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cluster.conftest import running
from transom_cluster.router.router import Router
from transom_cluster.router.timings import RouterTimings
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import FailoverConfig, ServerConfig
from transom_core.contract import ErrorInfo, Request, WorkerMessage
from transom_core.model_files.resolve import resolve_model
from transom_core.text.tokenizer import Tokenizer
from transom_worker.replica import WorkerReplica


class Mortal:
    """A worker that is gone once the router has read `num_events` of its requests; None: it stays.

    They are counted one by one, since a router that reads slowly gets many of them in one message.
    """

    def __init__(self, replica: WorkerReplica) -> None:
        self._replica = replica
        self.num_events: int | None = None
        self.is_dead = False

    async def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        self.check()
        async with contextlib.aclosing(self._replica.open_stream(router_id)) as stream:
            async for message in stream:
                self.check()
                if self.num_events is None or len(message.events) <= self.num_events:
                    yield message
                else:
                    yield replace(message, events=message.events[: self.num_events])
                    self.is_dead = True
                self.check()
                if self.num_events is not None:
                    self.num_events -= len(message.events)

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        self.check()
        return await self._replica.submit(router_id, requests)

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        await self._replica.abort(router_id, request_ids)

    async def resync(self, router_id: str) -> None:
        await self._replica.resync(router_id)

    async def info(self) -> Any:
        self.check()
        return await self._replica.info()

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        return ""

    def check(self) -> None:
        if self.is_dead:
            raise ConnectionError("the worker is gone")


class Workers:
    """A directory of these, until they are removed."""

    def __init__(self, *workers: Mortal) -> None:
        self._workers = {f"w{i}": worker for i, worker in enumerate(workers)}
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncGenerator[Mapping[str, Any], None]:
        while True:
            self._changed.clear()
            yield dict(self._workers)
            await self._changed.wait()

    def remove(self, name: str) -> None:
        del self._workers[name]
        self._changed.set()

    def wake(self) -> None:
        """There is no worker to wake."""


@contextlib.asynccontextmanager
async def routed(
    model: Path, *workers: Mortal, tracing: RouterTracing | None = None, **config: Any
) -> AsyncIterator[Router]:
    """A router of these workers, which places requests in turn unless `config`, fields of its ServerConfig, says otherwise."""
    router = Router(
        workers=Workers(*workers),
        tokenizer=Tokenizer.load(resolve_model(str(model))),
        config=ServerConfig(
            served_model_name="tiny",
            failover=FailoverConfig(wait_s=120.0),
            **{"routing_policy": "round_robin", **config},
        ),
        router_id="r",
        timings=RouterTimings(drain_s=0.0),
        tracing=tracing,
    )
    async with running(router, len(workers)):
        yield router
