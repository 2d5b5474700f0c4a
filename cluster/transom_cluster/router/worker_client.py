"""The interfaces between a router and its workers: `WorkerClient`, the calls to one worker, and `WorkerDirectory`, which lists all
workers."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from transom_core.contract import Adapter, ErrorInfo, PauseMode, Request, WorkerInfo, WorkerMessage


class WorkerClient(Protocol):
    """The calls that a router makes to one worker.

    The router opens one long event stream. The worker sends one message per engine step on it, with the events of accepted
    requests, the changes of its prefix index, and its load; the first message has the whole index. A new stream of the same router
    ends the old one. When a stream ends, the worker aborts that router's requests. Every method may raise any exception if the
    worker is lost.
    """

    is_scaled: bool  # whether the worker is of the deployment whose size autoscaling changes

    def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        """Open the event stream, and yield the worker's messages for this router."""

    async def resync(self, router_id: str) -> None:
        """Have the worker send its whole prefix index on the stream again."""

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        """Submit requests; the worker accepts either all or none of them. Return one entry for each: its error, or None."""

    async def abort(self, router_id: str, request_ids: list[str]) -> None:
        """Abort requests and free their blocks; unknown ids are ignored. A router calls this often enough, without ids too, to show
        that it is there: a worker ends the stream of a router that has not for 60 s, as it was killed."""

    async def info(self) -> WorkerInfo:
        """Return the worker's id, model and limits."""

    async def metrics_text(self, *, openmetrics: bool = False) -> str:
        """Return the worker's metrics page in Prometheus' text format, or in OpenMetrics' format, which has exemplars."""

    def watch_blocks(self, router_id: str, period_s: float) -> AsyncGenerator[bytes, None]:
        """Yield frames of the live block map (docs/block_map.md) every `period_s`: first one with all blocks, then the changes.
        They end with the router's event stream."""

    async def describe_block(self, group: int, block: int, tier: str = "device") -> dict[str, Any]:
        """Return the present content of one block of a tier ("device" or "host") as JSON values, for the block map's page."""

    async def pause(self, mode: PauseMode | None) -> None:
        """Pause the worker, and return when it computes nothing any more; None ends a pause."""

    async def update_weights(self, model: str) -> ErrorInfo | None:
        """Have the paused worker replace its weights by those of another checkpoint; return why it refused."""

    async def load_adapter(self, adapter: Adapter) -> ErrorInfo | None:
        """Have the worker load a LoRA adapter into a slot, as the first request for it would; return why it refused."""

    async def measure_fetch(self, source: str, num_bytes: int, wire: str) -> dict[str, Any]:
        """Have the worker fetch about `num_bytes` of any cached blocks from another one by a wire, "nixl" or "ray", and drop them.
        Return the fields of its `FetchReport`."""

    async def request_timeline(self, request_id: str) -> list[dict[str, Any]]:
        """Return the events of a request at this worker as JSON values; empty if the worker does not know the request any more."""


def describe_worker(info: WorkerInfo) -> dict[str, Any]:
    """Return a worker's description as JSON values, with its cache as the names of the cache groups."""
    return {**asdict(info), "identity": info.identity, "cache": [group.name for group in info.cache.groups]}


class WorkerDirectory(Protocol):
    """The workers that exist. Worker ids are not reused: a worker that starts again is another worker."""

    def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """Yield the present workers by id, at once and again at every change.

        A worker that is no longer listed is lost or drains, and gets no new requests; its client works as long as the worker runs.
        """

    def wake(self) -> None:
        """Ask for a worker because a request waits, in case autoscaling has stopped all of them. Returns at once."""
