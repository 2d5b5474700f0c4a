"""`BlockMap`: serves the live block map of one worker; it has the watchers, and the loop that makes frames for them.

- **watcher**: one client that receives this worker's frames over HTTP.
- **frame**: one message of the block map, with all blocks (a whole frame) or the changes since the frame before.
- **round**: the time from the first watcher's arrival until no watcher is left.

A frame is made in two parts: the engine's thread copies the state (`SnapshotTaker`), and another thread finds what changed
(`Encoder`). So a step waits at most for a copy, and without watchers for nothing.
"""

import asyncio
import contextlib
import contextvars
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from transom_core.clock import steady_time_s
from transom_core.errors import Overloaded, RequestError
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.telemetry.blockmap.describe import describe_block
from transom_worker.telemetry.blockmap.encoder import Encoder, WorkerIdentity
from transom_worker.telemetry.blockmap.frame import Frame
from transom_worker.telemetry.blockmap.log import BlockMapLog
from transom_worker.telemetry.blockmap.snapshot import Snapshot, SnapshotTaker

logger = logging.getLogger("transom.worker")

# Runs a function on the engine's thread, between two steps.
OnEngine = Callable[[Callable[[], Any]], Awaitable[Any]]

MAX_WATCHERS = 16
MAX_PENDING = 3  # frames in a watcher's queue; a watcher that is slower starts again with a whole frame
LEAST_PERIOD_S = 0.1
HEARTBEAT_S = 5.0  # a frame is sent this often even if nothing changes


class Watcher:
    """One client of the block map, with its bounded queue of frames. The event loop calls all methods.

    A watcher first receives a whole frame, and then frames of changes. If it is too slow, its queue is emptied, and it starts again
    with a whole frame.
    """

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


@dataclass(slots=True, eq=False)
class BlockMap:
    """The block map of one worker. One event loop calls all methods.

    Watchers get frames at most once in `least_period_s`, and once in `heartbeat_s` while nothing changes.
    """

    identity: WorkerIdentity
    scheduler: Scheduler
    log: BlockMapLog
    on_engine: OnEngine
    least_period_s: float = LEAST_PERIOD_S
    heartbeat_s: float = HEARTBEAT_S
    _watchers: set[Watcher] = field(default_factory=set, init=False)
    _came: asyncio.Event = field(default_factory=asyncio.Event, init=False)  # a watcher came or went
    _maker: asyncio.Task[None] | None = field(default=None, init=False)

    async def watch(self, period_s: float) -> AsyncGenerator[bytes, None]:
        """Stream frames, at most one in `period_s`, or more often if another watcher has a shorter period. The first frame is
        whole.

        Raises:
            Overloaded: there are too many watchers already.  RequestError: the period is too short.
        """
        if not period_s >= self.least_period_s:
            raise RequestError(f"period_s is {period_s}; it must be at least {self.least_period_s}.", param="period_s")
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} others watch the blocks of this worker already; close one of them first.")
        watcher = Watcher(period_s)
        self._watchers.add(watcher)
        self._came.set()
        if self._maker is None:
            # In a context of its own: in the first watcher's, Serve would end the task with that watcher's call.
            self._maker = asyncio.create_task(self._make_frames(), context=contextvars.Context())
        number = 0
        try:
            while True:
                yield (await watcher.next()).numbered(number)
                number += 1
        finally:
            self._watchers.discard(watcher)
            self._came.set()

    async def describe(self, group: int, block: int, tier: str = "device") -> dict[str, Any]:
        """Describe one block as it is now, as `describe_block` does; `tier` is "device" or "host"."""
        described: dict[str, Any] = await self.on_engine(lambda: describe_block(self.scheduler, group, block, tier))
        return described

    async def _make_frames(self) -> None:
        """Make frames while there are watchers. A watcher that arrives while a round ends gets another round."""
        try:
            while self._watchers:
                await self._round()
        except Exception as error:
            logger.exception("The block map failed.")
            for watcher in self._watchers:
                watcher.fail(error)
        finally:
            self._maker = None

    async def _round(self) -> None:
        frames = FrameMaker(self.scheduler, self.log, self.on_engine, heartbeat_s=self.heartbeat_s)
        try:
            await frames.begin(self.identity)
            while self._watchers:
                self._came.clear()
                await frames.make(self._watchers, min(watcher.period_s for watcher in self._watchers))
                await self._pause(frames.due_s)
        finally:
            with contextlib.suppress(Exception):  # the engine may have ended
                await self.on_engine(frames.snapshots.end)

    async def _pause(self, until_s: float) -> None:
        """Wait until the next snapshot is due, or a watcher came or went."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await self._came.wait()


class FrameMaker:
    """Makes the frames of one round: changes for the watchers that have a whole frame already, whole frames for the others."""

    def __init__(self, scheduler: Scheduler, log: BlockMapLog, on_engine: OnEngine, *, heartbeat_s: float) -> None:
        self.snapshots = SnapshotTaker(scheduler, log)
        self.encoder: Encoder
        self.due_s = 0.0  # when the next snapshot may be taken
        self._layout = scheduler.cache.layout
        self._log = log
        self._on_engine = on_engine
        self._heartbeat_s = heartbeat_s
        self._num_seen = -1  # the log's `num_changes` at the last snapshot
        self._sent_s = 0.0  # time of the last frame

    async def begin(self, identity: WorkerIdentity) -> None:
        """Copy all blocks, one group or piece of the host tier at a time, so that steps can run in between."""
        cache, host = self.snapshots.cache, self.snapshots.cache.host
        host_layout = None if host is None else host.layout
        self.encoder = await asyncio.to_thread(Encoder, identity, self._layout, self._log.history, host_layout)
        await self._on_engine(self.snapshots.begin)
        for group in range(len(self._layout.groups)):
            copy = await self._on_engine(functools.partial(cache.copy, group))
            await asyncio.to_thread(self.encoder.start, group, copy)
        if host is not None:
            for pages in host.pieces:
                piece = await self._on_engine(functools.partial(host.copy, pages))
                await asyncio.to_thread(self.encoder.start_host, piece)

    async def make(self, watchers: set[Watcher], period_s: float) -> None:
        """Make a frame of changes, if it is due and anything changed, and a whole frame for the watchers that need one."""
        begin_s = time.monotonic()
        if begin_s >= self.due_s:
            self.due_s = begin_s + period_s
            if (frame := await self._changes(begin_s)) is not None:
                self._sent_s = begin_s
                for watcher in watchers:
                    watcher.offer(frame, whole=False)
        if waiting := [watcher for watcher in watchers if watcher.needs_whole_now]:
            whole = await asyncio.to_thread(self.encoder.whole, steady_time_s())
            for watcher in waiting:
                watcher.offer(whole, whole=True)

    async def _changes(self, now_s: float) -> Frame | None:
        if self._log.num_changes != self._num_seen:
            self._num_seen, snapshot = await self._on_engine(self._take)
            return await asyncio.to_thread(self.encoder.update, snapshot)
        if not self.encoder.is_settled or now_s - self._sent_s >= self._heartbeat_s:
            return await asyncio.to_thread(self.encoder.again, steady_time_s())
        return None

    def _take(self) -> tuple[int, Snapshot]:
        return self._log.num_changes, self.snapshots.take()
