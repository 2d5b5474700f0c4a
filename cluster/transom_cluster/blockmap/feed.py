"""One worker's frames for one client: read as they come, begun anew where the client is too slow or the stream breaks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

from transom_cluster.blockmap.outbox import Outbox
from transom_cluster.router.worker_client import WorkerClient
from transom_worker.errors import TransomError

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
MAX_MESSAGE_CHARS = 300


def sse(event: str, data: bytes) -> bytes:
    """One server-sent event; `data` without line breaks."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data)


def sse_json(event: str, value: Any) -> bytes:
    """The same with JSON."""
    return sse(event, json.dumps(value).encode())


class Feed:
    """Follows one worker until it is cancelled."""

    def __init__(self, worker: str, client: WorkerClient, outbox: Outbox, *, period_s: float) -> None:
        self._worker = worker
        self._client = client
        self._outbox = outbox
        self._period_s = period_s
        self._pause_s = FIRST_PAUSE_S
        self._problem = ""  # that the client knows of

    async def run(self) -> None:
        """Read the worker's stream, again and again.

        A worker never waits for a client: one that has too much to read loses the stream, and gets a whole frame once it is there.
        """
        while True:
            try:
                await self._read()
                await self._outbox.emptied(self._worker)
            except Exception as error:  # whatever it is: this worker's cells stand still, the others' do not
                self._tell(error)
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _read(self) -> None:
        """Until the client is behind.

        Raises:
            ConnectionError: the stream ended; or whatever broke it.
        """
        async with contextlib.aclosing(self._client.watch_blocks(self._period_s)) as frames:
            async for frame in frames:
                if self._outbox.is_full(self._worker):
                    return
                self._outbox.put(sse("frame", base64.b64encode(frame)), self._worker)
                self._pause_s, self._problem = FIRST_PAUSE_S, ""
        raise ConnectionError("the stream ended")

    def _tell(self, error: Exception) -> None:
        message = describe_error(error)
        if message != self._problem:
            self._problem = message
            self._outbox.put(sse_json("problem", {"worker": self._worker, "message": message}))


def describe_error(error: Exception) -> str:
    """For people; what is not in Transom's tree only by its kind, since nobody knows what its message has."""
    cause = getattr(error, "cause", None) or error  # Ray wraps what a worker raised
    if isinstance(cause, TransomError):
        return str(cause)[:MAX_MESSAGE_CHARS]
    return f"The worker's block map is not to be had just now ({type(cause).__name__}); trying again."
