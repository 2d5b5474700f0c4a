"""The seam between router and worker: what a router may ask, and how it asks over a Serve handle."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from transom_worker.contract import ErrorInfo, Request, WorkerInfo, WorkerMessage


class WorkerClient(Protocol):
    """One worker, as seen from a router.

    Events of accepted requests come on the router's one long stream: a message per engine step, with what changed of prefix index
    and load. The first message has the whole index. A newer stream of the same router ends the older; when a stream ends the
    worker aborts that router's requests. Every method may raise anything when the worker is gone.
    """

    def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        """The events of all requests of this router."""

    async def resync(self, router_id: str) -> None:
        """Ask for the whole index again, on the stream."""

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Admit all requests or none; one entry each, None where nothing was wrong with it."""

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Drop requests and free their blocks; unknown ids are ignored."""

    async def info(self) -> WorkerInfo:
        """Who it is and what it can do."""

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """The worker's page in Prometheus' text format, or as OpenMetrics, which has exemplars."""

    def watch_blocks(self, period_s: float) -> AsyncGenerator[bytes, None]:
        """Frames of the live block map (docs/block_map.md): the first tells all, later ones what changed."""

    async def describe_block(self, group: int, block: int) -> dict[str, Any]:
        """One block now, as JSON values, for a person who points at it."""

    async def request_life(self, request_id: str) -> list[dict[str, Any]]:
        """What happened to a request here, step by step, as JSON values; empty if it is not known (any more)."""


def describe_worker(info: WorkerInfo) -> dict[str, Any]:
    """A worker for people, as JSON values: its cache by the groups' names."""
    return {**asdict(info), "cache": [group.name for group in info.cache.groups]}


class WorkerDirectory(Protocol):
    """Which workers there are. Ids are never given again: a worker that comes back is another one."""

    def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """The present workers by id, at once and again at every change. One that is missing takes no new requests (it is gone, or
        drains); its client works as long as it lives."""

    def wake(self) -> None:
        """A request waits and there is no worker: one is started where all were scaled away. Returns at once."""


class ServeWorkerClient:
    """One replica of a worker deployment, behind a Ray Serve handle.

    It holds `replica`, Serve's own object for it, so that calls reach a worker that drains; see `ReplicaRequestRouter`.
    """

    def __init__(self, handle: Any, worker_id: str, replica: object) -> None:
        self._handle = handle.options(session_id=worker_id)
        self._streaming = self._handle.options(stream=True)
        self._replica = replica

    async def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        """See `WorkerClient`. Ending the iteration cancels the call at the worker."""
        response = self._streaming.open_stream.remote(router_id)
        try:
            async for message in response:
                yield message
        finally:
            response.cancel()

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """See `WorkerClient`."""
        results: list[ErrorInfo | None] = await self._handle.submit.remote(router_id, requests)
        return results

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """See `WorkerClient`."""
        await self._handle.abort.remote(router_id, request_ids)

    async def resync(self, router_id: str) -> None:
        """See `WorkerClient`."""
        await self._handle.resync.remote(router_id)

    async def info(self) -> WorkerInfo:
        """See `WorkerClient`."""
        info: WorkerInfo = await self._handle.info.remote()
        return info

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """See `WorkerClient`."""
        text: str = await self._handle.metrics_text.remote(openmetrics=openmetrics)
        return text

    async def watch_blocks(self, period_s: float) -> AsyncGenerator[bytes, None]:
        """See `WorkerClient`. Ending the iteration cancels the call at the worker."""
        response = self._streaming.watch_blocks.remote(period_s)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def describe_block(self, group: int, block: int) -> dict[str, Any]:
        """See `WorkerClient`."""
        description: dict[str, Any] = await self._handle.describe_block.remote(group, block)
        return description

    async def request_life(self, request_id: str) -> list[dict[str, Any]]:
        """See `WorkerClient`."""
        life: list[dict[str, Any]] = await self._handle.request_life.remote(request_id)
        return life
