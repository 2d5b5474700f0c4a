"""`Watcher`: one client of the block map, with its bounded queue of frames.

A watcher first receives a whole frame, and then frames of changes. If it is too slow, its queue is emptied, and it starts again
with a whole frame.
"""

from __future__ import annotations

import asyncio
from collections import deque

from transom_worker.telemetry.blockmap.frame import Frame

MAX_PENDING = 3


class Watcher:
    """A watcher of one worker's blocks. The event loop calls all methods."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._pending: deque[Frame] = deque()
        self._needs_whole = True
        self._is_waiting = True
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    @property
    def needs_whole_now(self) -> bool:
        """Whether the watcher needs a whole frame before it can use changes, and is waiting for a frame."""
        return self._needs_whole and self._is_waiting

    def offer(self, frame: Frame, *, whole: bool) -> None:
        """Queue a frame. A frame of changes is dropped while a whole frame is needed; a full queue is emptied."""
        if self._needs_whole and not whole:
            return
        self._needs_whole = len(self._pending) >= MAX_PENDING
        if self._needs_whole:
            self._pending.clear()
            return
        self._pending.append(frame)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the watcher's frames with an error."""
        self._error = error
        self._ready.set()

    async def next(self) -> Frame:
        """Wait for the next frame."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._is_waiting = True
            self._ready.clear()
            await self._ready.wait()
        self._is_waiting = False
        return self._pending.popleft()
