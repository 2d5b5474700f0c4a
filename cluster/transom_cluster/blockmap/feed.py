"""`Feed` passes one worker's block map frames to one client, through the client's `Outbox`.

- **frame**: a binary message with blocks. A **whole frame** has all blocks of the worker; later frames have only the changes.
- **feed**: reads the frames of one worker and puts them into the client's outbox as server-sent events. If the client reads too
  slowly or the worker's stream breaks, the feed opens the stream again and begins with a whole frame.
"""

import asyncio
import base64
import contextlib
import json
from collections import Counter, deque
from typing import Any

from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_client import WorkerClient
from transom_core.errors import TransomError

MAX_UNSENT = 2  # frames of one worker that may wait
MAX_MESSAGE_CHARS = 300  # of an error's text on the page


def sse(event: str, data: bytes) -> bytes:
    """Return one server-sent event; `data` must not have line breaks."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data)


def sse_json(event: str, value: Any) -> bytes:
    """Return one server-sent event with a value as JSON."""
    return sse(event, json.dumps(value).encode())


class Outbox:
    """A queue of events: the workers' feeds fill it, and the response's task empties it. Runs on one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, str | None]] = deque()
        self.num_unsent: Counter[str] = Counter()  # frames by worker; workers without a waiting frame have no entry
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()

    def is_full(self, worker: str) -> bool:
        """Return whether `MAX_UNSENT` frames of this worker wait."""
        return self.num_unsent[worker] >= MAX_UNSENT

    def put(self, event: bytes, worker: str | None = None) -> None:
        """Add a server-sent event. `worker` is the worker whose frame it is; None for other events."""
        self._waiting.append((event, worker))
        if worker is not None:
            self.num_unsent[worker] += 1
        self._changed.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """Take the next event; return None if none came within `timeout_s`."""
        if not self._waiting:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        if not self._waiting:
            return None
        event, worker = self._waiting.popleft()
        if worker is not None:
            self._uncount(worker)
            self._sent.set()
        return event

    def _uncount(self, worker: str) -> None:
        self.num_unsent[worker] -= 1
        if not self.num_unsent[worker]:
            del self.num_unsent[worker]

    async def wait_until_empty(self, worker: str) -> None:
        """Wait until all of this worker's frames have been taken."""
        while self.num_unsent[worker]:
            self._sent.clear()
            await self._sent.wait()


class Feed:
    """Reads the frames of one worker until its task is cancelled."""

    def __init__(
        self,
        worker: str,
        client: WorkerClient,
        outbox: Outbox,
        *,
        router_id: str,
        period_s: float,
        timings: RouterTimings,
    ) -> None:
        self._worker = worker
        self._router_id = router_id
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
        async with contextlib.aclosing(self._client.watch_blocks(self._router_id, self._period_s)) as frames:
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
