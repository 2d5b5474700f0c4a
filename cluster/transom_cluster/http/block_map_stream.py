"""Streams the live block maps of all workers, merged, to one client as server-sent events.

Feed: the task that reads one worker's frames; the stream starts and ends feeds as workers come and go.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from transom_cluster.blockmap.feed import Feed, sse_json
from transom_cluster.blockmap.outbox import Outbox
from transom_cluster.http.client_disconnect import run_until_disconnect
from transom_cluster.http.request_state import request_state
from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.router import Router

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # reverse proxies must not hold frames back
]


class BlockStream(Response):
    """Sends frames until the client disconnects or the router drains. With `worker` None it sends those of all workers."""

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
            await run_until_disconnect(self._send_all(send), receive)
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
        """Start feeds of new workers, end feeds of lost ones, and send the client the new list of workers."""
        connections = {
            worker: connection
            for worker, connection in self._router.connections.items()
            if self._worker in (None, worker)
        }
        for worker in self._feeds.keys() - connections.keys():
            self._feeds.pop(worker).cancel()
        for worker in connections.keys() - self._feeds.keys():
            client, timings = connections[worker].client, self._router.timings
            feed = Feed(worker, client, self._outbox, period_s=self._period_s, timings=timings)
            self._feeds[worker] = self._tasks.spawn(feed.run())
        model = self._router.config.served_model_name
        present = [
            {"worker": worker, "model": model, "state": connection.state} for worker, connection in connections.items()
        ]
        if present != self._sent_workers:
            self._sent_workers = present
            self._outbox.put(sse_json("workers", present))
