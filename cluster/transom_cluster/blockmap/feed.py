"""`Feed`: passes one worker's block map frames to one client.

- **frame**: a binary message with blocks. A **whole frame** has all blocks of the worker; later frames have only the changes.
- **feed**: reads the frames of one worker and puts them into the client's outbox as server-sent events. If the client reads too
  slowly or the worker's stream breaks, the feed opens the stream again and begins with a whole frame.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

from transom_cluster.blockmap.outbox import Outbox
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_client import WorkerClient
from transom_core.errors import TransomError

MAX_MESSAGE_CHARS = 300


def sse(event: str, data: bytes) -> bytes:
    """Return one server-sent event; `data` must not have line breaks."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data)


def sse_json(event: str, value: Any) -> bytes:
    """Return one server-sent event with a value as JSON."""
    return sse(event, json.dumps(value).encode())


class Feed:
    """Reads the frames of one worker until its task is cancelled."""

    def __init__(
        self, worker: str, client: WorkerClient, outbox: Outbox, *, period_s: float, timings: RouterTimings
    ) -> None:
        self._worker = worker
        self._client = client
        self._outbox = outbox
        self._period_s = period_s
        self._timings = timings
        self._pause_s = timings.first_feed_pause_s
        self._problem = ""  # the last problem that was sent to the client

    async def run(self) -> None:
        """Read the worker's stream, and open it again whenever it ends.

        A worker never waits for a client: the feed of a slow client closes the stream, and opens it again once the client has
        read its outbox.
        """
        while True:
            try:
                await self._read()
                await self._outbox.wait_until_empty(self._worker)
            except Exception as error:  # other workers' feeds continue
                self._report(error)
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, self._timings.longest_feed_pause_s)

    async def _read(self) -> None:
        """Read frames until the client's outbox is full.

        Raises:
            ConnectionError: the stream ended. Any other error that breaks the stream is raised unchanged.
        """
        async with contextlib.aclosing(self._client.watch_blocks(self._period_s)) as frames:
            async for frame in frames:
                if self._outbox.is_full(self._worker):
                    return
                self._outbox.put(sse("frame", base64.b64encode(frame)), self._worker)
                self._pause_s, self._problem = self._timings.first_feed_pause_s, ""
        raise ConnectionError("the stream ended")

    def _report(self, error: Exception) -> None:
        message = describe_error(error)
        if message != self._problem:
            self._problem = message
            self._outbox.put(sse_json("problem", {"worker": self._worker, "message": message}))


def describe_error(error: Exception) -> str:
    """Return a text about an error for the page. An error that is not Transom's own is named by its class only, since its message
    may hold anything."""
    cause = getattr(error, "cause", None) or error  # Ray wraps what a worker raised
    if isinstance(cause, TransomError):
        return str(cause)[:MAX_MESSAGE_CHARS]
    return f"The worker's block map is not available now ({type(cause).__name__}); trying again."
