"""The interface between a router and the workers: what a router calls on one worker, and the directory of all workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from transom_core.contract import ErrorInfo, Request, WorkerInfo, WorkerMessage


class WorkerClient(Protocol):
    """One worker, as a router calls it.

    The router opens one long event stream. Events of accepted requests come on it, in one message per engine step, with the
    changes of the worker's prefix index and its load; the first message has the whole index. A newer stream of the same router
    ends the older one. When a stream ends, the worker aborts that router's requests. Every method may raise any exception when
    the worker is lost.
    """

    def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        """The messages for this router."""

    async def resync(self, router_id: str) -> None:
        """Have the worker send its whole prefix index on the stream again."""

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Submit requests, which the worker accepts all or none. Returns one entry for each: its error, or None."""

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Abort requests and free their blocks; unknown ids are ignored."""

    async def info(self) -> WorkerInfo:
        """The worker's id, model and limits."""

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """The worker's page of metrics in Prometheus' text format, or as OpenMetrics, which has exemplars."""

    def watch_blocks(self, period_s: float) -> AsyncGenerator[bytes, None]:
        """Frames of the live block map (docs/block_map.md), one each `period_s`: the first has all blocks, later ones the
        changes."""

    async def describe_block(self, group: int, block: int, tier: str = "device") -> dict[str, Any]:
        """The present content of one block of a tier ("device" or "host") as JSON values, for the page of the block map."""

    async def request_timeline(self, request_id: str) -> list[dict[str, Any]]:
        """The events of a request at this worker as JSON values; empty where the worker does not know the request any more."""


def describe_worker(info: WorkerInfo) -> dict[str, Any]:
    """A worker as JSON values, its cache by the names of the cache groups."""
    return {**asdict(info), "identity": info.identity, "cache": [group.name for group in info.cache.groups]}


class WorkerDirectory(Protocol):
    """The workers that exist. Worker ids are not reused: a worker that starts again is another worker."""

    def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """The present workers by id, at once and again at every change.

        A worker that is missing is lost or drains, and gets no new requests; its client works as long as the worker runs.
        """

    def wake(self) -> None:
        """Ask for a worker where all were scaled away, because a request waits; returns at once."""
