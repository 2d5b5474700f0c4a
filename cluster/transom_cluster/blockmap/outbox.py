"""`Outbox`: the server-sent events that wait to be sent to one client of the block map, with a limit on the frames of each
worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque

MAX_UNSENT = 2  # frames of one worker that may wait


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
