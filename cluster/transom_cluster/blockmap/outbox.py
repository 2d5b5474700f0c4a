"""What waits to be sent to one client of the block map: its frames are counted by worker, so that nobody queues without bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque

MAX_UNSENT = 2  # frames of one worker


class Outbox:
    """Filled by the feeds of workers, emptied by the one who sends. On one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, str | None]] = deque()
        self._unsent: Counter[str] = Counter()  # of workers of which something waits: those that are gone are not kept
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()

    def is_full(self, worker: str) -> bool:
        """Whether the client is behind with this worker's frames."""
        return self._unsent[worker] >= MAX_UNSENT

    def put(self, event: bytes, worker: str | None = None) -> None:
        """One server-sent event; `worker` where it is a frame of one."""
        self._waiting.append((event, worker))
        if worker is not None:
            self._unsent[worker] += 1
        self._changed.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """The next event, None if there is none in time."""
        if not self._waiting:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        if not self._waiting:
            return None
        event, worker = self._waiting.popleft()
        if worker is not None:
            self._take_off(worker)
            self._sent.set()
        return event

    def _take_off(self, worker: str) -> None:
        self._unsent[worker] -= 1
        if not self._unsent[worker]:
            del self._unsent[worker]

    async def emptied(self, worker: str) -> None:
        """Until none of this worker's frames waits."""
        while self._unsent[worker]:
            self._sent.clear()
            await self._sent.wait()
