"""The client of one worker replica behind a Ray Serve handle.

Ray says in words how a replica's process ended, and not with which signal. All that is read there is whether its node is gone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError

from transom_core.contract import ErrorInfo, Request, WorkerInfo, WorkerMessage
from transom_core.errors import LossCause, WorkerLost

NODE_DIED = "its node has died"  # in Ray's words on an actor whose host is gone


class ServeWorkerClient:
    """Implements `WorkerClient` for one replica of a worker deployment: each method calls the worker's method of that name.

    It holds `replica`, Serve's own object for the replica, so that calls reach the worker while it drains (`ReplicaRequestRouter`).
    """

    def __init__(self, handle: Any, worker_id: str, replica: object) -> None:
        self._handle = handle.options(session_id=worker_id)
        self._streaming = self._handle.options(stream=True)
        self._replica = replica

    async def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        """Iterate over the worker's stream. Ending the iteration cancels the call at the worker."""
        response = self._streaming.open_stream.remote(router_id)
        try:
            async for message in response:
                yield message
        except RayActorError as error:
            raise WorkerLost(f"The worker's process has ended: {error}", loss_cause=_loss_cause(error)) from error
        finally:
            response.cancel()

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Call the worker's `submit`."""
        results: list[ErrorInfo | None] = await self._handle.submit.remote(router_id, requests)
        return results

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Call the worker's `abort`."""
        await self._handle.abort.remote(router_id, request_ids)

    async def resync(self, router_id: str) -> None:
        """Call the worker's `resync`."""
        await self._handle.resync.remote(router_id)

    async def info(self) -> WorkerInfo:
        """Call the worker's `info`."""
        info: WorkerInfo = await self._handle.info.remote()
        return info

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """Call the worker's `metrics_text`."""
        text: str = await self._handle.metrics_text.remote(openmetrics=openmetrics)
        return text

    async def watch_blocks(self, period_s: float) -> AsyncGenerator[bytes, None]:
        """Iterate over the worker's stream. Ending the iteration cancels the call at the worker."""
        response = self._streaming.watch_blocks.remote(period_s)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def describe_block(self, group: int, block: int, tier: str = "device") -> dict[str, Any]:
        """Call the worker's `describe_block`."""
        description: dict[str, Any] = await self._handle.describe_block.remote(
            group, block, *([tier] if tier != "device" else [])
        )  # older workers have no tiers
        return description

    async def request_timeline(self, request_id: str) -> list[dict[str, Any]]:
        """Call the worker's `request_timeline`."""
        timeline: list[dict[str, Any]] = await self._handle.request_timeline.remote(request_id)
        return timeline


def _loss_cause(error: RayActorError) -> LossCause:
    return "host_lost" if error.preempted or NODE_DIED in " ".join(str(error).split()) else "unknown"
