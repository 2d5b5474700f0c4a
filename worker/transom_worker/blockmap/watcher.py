"""One watcher's queue of frames: bounded, since who is too slow for what changed gets all of it anew."""

from __future__ import annotations

import asyncio
from collections import deque

from transom_worker.blockmap.frame import Frame

MAX_PENDING = 3


class Watcher:
    """On the event loop. It begins without a frame, and wants a whole one."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._pending: deque[Frame] = deque()
        self._needs_whole = True
        self._is_waiting = True
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    @property
    def wants_whole(self) -> bool:
        """Whether what changed is of no use to it, and it is there to take a whole frame."""
        return self._needs_whole and self._is_waiting

    @property
    def num_pending(self) -> int:
        """Frames that it has not taken."""
        return len(self._pending)

    def give(self, frame: Frame, *, whole: bool) -> None:
        """The next frame; what changed is dropped while a whole one is due, and all is when too many wait."""
        if self._needs_whole and not whole:
            return
        self._needs_whole = len(self._pending) >= MAX_PENDING
        if self._needs_whole:
            self._pending.clear()
            return
        self._pending.append(frame)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """No frame will come any more."""
        self._error = error
        self._ready.set()

    async def next(self) -> Frame:
        """The next frame, as soon as there is one."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._is_waiting = True
            self._ready.clear()
            await self._ready.wait()
        self._is_waiting = False
        return self._pending.popleft()
