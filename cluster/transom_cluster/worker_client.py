"""The seam between router and worker: what a router may ask, and how it asks over a Serve handle."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from transom_worker.contract import ErrorInfo, OutputEvent, Request


class WorkerClient(Protocol):
    """One worker, as seen from a router.

    Events of accepted requests come on the router's one long stream: a list per engine step, and first an empty list that says
    that the stream is open. A newer stream of the same router ends the older; when a stream ends the worker aborts that
    router's requests. Every method may raise anything when the worker is gone.
    """

    def open_stream(self, router_id: str) -> AsyncGenerator[list[OutputEvent], None]:
        """The events of all requests of this router."""

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Admit all requests or none; one entry each, None where nothing was wrong with it."""

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Drop requests and free their blocks; unknown ids are ignored."""

    async def info(self) -> dict[str, Any]:
        """At least `max_model_len` and `vocab_size`."""

    async def metrics_text(self) -> str:
        """The worker's page in Prometheus' text format."""


class ServeWorkerClient:
    """A worker deployment behind a Ray Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def open_stream(self, router_id: str) -> AsyncGenerator[list[OutputEvent], None]:
        """See `WorkerClient`. Ending the iteration cancels the call at the worker."""
        response = self._streaming.open_stream.remote(router_id)
        try:
            async for events in response:
                yield events
        finally:
            response.cancel()

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """See `WorkerClient`."""
        results: list[ErrorInfo | None] = await self._handle.submit.remote(router_id, requests)
        return results

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """See `WorkerClient`."""
        await self._handle.abort.remote(router_id, request_ids)

    async def info(self) -> dict[str, Any]:
        """See `WorkerClient`."""
        info: dict[str, Any] = await self._handle.info.remote()
        return info

    async def metrics_text(self) -> str:
        """See `WorkerClient`."""
        text: str = await self._handle.metrics_text.remote()
        return text
