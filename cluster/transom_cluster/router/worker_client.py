"""The interface between a router and the workers: what a router calls on one worker, and the directory of all workers."""

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

    async def request_timeline(self, request_id: str) -> list[dict[str, Any]]:
        """What happened to a request here, step by step, as JSON values; empty if it is not known (any more)."""


def describe_worker(info: WorkerInfo) -> dict[str, Any]:
    """A worker for people, as JSON values: its cache by the groups' names."""
    return {**asdict(info), "cache": [group.name for group in info.cache.groups]}


class WorkerDirectory(Protocol):
    """Which workers there are. Ids are never given again: a worker that comes back is another one."""

    def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """The present workers by id, at once and again at every change. One that is missing takes no new requests (it is gone, or
        drains); its client works as long as it timelines."""

    def wake(self) -> None:
        """A request waits and there is no worker: one is started where all were scaled away. Returns at once."""
