"""The routes of the live block map: its page and files, a block's description, and one stream with the frames of all workers.

Feed: the task that reads one worker's frames. A stream starts and ends feeds as workers join and leave (docs/block_map.md).
"""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from transom_cluster.blockmap.feed import Feed, Outbox, describe_error, sse_json
from transom_cluster.blockmap.static_files import PAGE, file_response
from transom_cluster.http.client_disconnect import until_disconnect
from transom_cluster.http.request_state import request_state
from transom_cluster.openai.answer.error_responses import HttpError
from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.router import Router
from transom_core.errors import WorkerLost

MIN_PERIOD_S, MAX_PERIOD_S = 0.1, 10.0
DESCRIBE_TIMEOUT_S = 10.0  # for the worker's answer about one block

_Period = Annotated[float, Query(gt=0, allow_inf_nan=False)]


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the block map's routes to the app."""
    _add_file_routes(api)
    _add_data_routes(api, router)


def _add_file_routes(api: FastAPI) -> None:
    @api.get("/blocks", summary="The live block map, a page for people", response_class=HTMLResponse)
    def page(request: Request) -> Response:
        return _file(PAGE, request)

    @api.get("/blocks/assets/{name}", include_in_schema=False)
    def asset(name: str, request: Request) -> Response:
        return _file(name, request)


def _file(name: str, request: Request) -> Response:
    response = file_response(name, request)
    if response is None:
        raise HTTPException(404)
    return response


def _add_data_routes(api: FastAPI, router: Router) -> None:
    @api.get("/blocks/stream", include_in_schema=False)
    async def stream(worker: str | None = None, period_s: _Period = 0.5) -> Response:
        if worker is not None:
            check_worker(router, worker)
        period_s = min(max(period_s, MIN_PERIOD_S), MAX_PERIOD_S)
        return BlockStream(router, worker=worker, period_s=period_s)

    @api.get("/blocks/describe", include_in_schema=False)
    async def describe(
        worker: str, group: int, block: int, tier: Literal["device", "host"] = "device"
    ) -> dict[str, Any]:
        check_worker(router, worker)
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                described = await router.connections[worker].client.describe_block(group, block, tier)
        except Exception as error:
            raise WorkerLost(describe_error(error)) from error
        if "error" in described:
            raise HttpError(404, described["error"], param="block", code="block_not_found")
        return {"worker": worker, **described}


def check_worker(router: Router, worker: str) -> None:
    """Raise HttpError if there is no such worker."""
    if worker not in router.connections:
        known = ", ".join(sorted(router.connections)) or "none"
        message = f"There is no worker {worker!r}; the workers are: {known}."
        raise HttpError(404, message, param="worker", code="worker_not_found")


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # tells reverse proxies not to buffer frames
]


class BlockStream(Response):
    """Sends the frames of one worker, or of all workers if `worker` is None, until the client disconnects or the router drains."""

    def __init__(self, router: Router, *, worker: str | None, period_s: float) -> None:
        super().__init__()
        self._router = router
        self._worker = worker
        self._period_s = period_s
        self._outbox = Outbox()
        self._tasks = BackgroundTasks()
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._sent_workers: list[dict[str, Any]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames, and cancel all feeds at the end."""
        request_state(scope).outcome.mark_endless()
        try:
            await until_disconnect(self._send_all(send), receive)
        finally:
            await self._tasks.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        sent_s, timings = time.monotonic(), self._router.timings
        while not self._router.is_draining:
            self._update_feeds()
            event = await self._outbox.next(timings.block_map_poll_s)
            if event is None and time.monotonic() - sent_s < timings.block_map_keepalive_s:
                continue
            await send({"type": "http.response.body", "body": event or b": still here\n\n", "more_body": True})
            sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _update_feeds(self) -> None:
        """Start feeds for new workers, end those of lost ones, and send the client the list of workers if it has changed."""
        connections = {
            worker: connection
            for worker, connection in self._router.connections.items()
            if self._worker in (None, worker)
        }
        for worker in self._feeds.keys() - connections.keys():
            self._feeds.pop(worker).cancel()
        for worker in connections.keys() - self._feeds.keys():
            client, timings = connections[worker].client, self._router.timings
            feed = Feed(
                worker, client, self._outbox, router_id=self._router.router_id, period_s=self._period_s, timings=timings
            )
            self._feeds[worker] = self._tasks.spawn(feed.run())
        model = self._router.config.served_model_name
        present = [
            {"worker": worker, "model": model, "state": connection.state} for worker, connection in connections.items()
        ]
        if present != self._sent_workers:
            self._sent_workers = present
            self._outbox.put(sse_json("workers", present))
