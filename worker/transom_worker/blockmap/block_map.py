"""All who watch one worker's blocks, and the loop that makes frames for them while there are any.

A frame is made in two halves: the engine's thread copies (`Snapshots`), another thread works out what changed (`Encoder`). So a
step waits for the copy at most, and without watchers for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from transom_worker.blockmap.describe import describe_block
from transom_worker.blockmap.encoder import Encoder, Identity
from transom_worker.blockmap.log import BlockMapLog
from transom_worker.blockmap.snapshot import Snapshot, Snapshots
from transom_worker.blockmap.watcher import Watcher
from transom_worker.errors import Overloaded, RequestError
from transom_worker.scheduling.scheduler import Scheduler

logger = logging.getLogger("transom.worker")

MAX_WATCHERS = 16
LEAST_PERIOD_S = 0.1
HEARTBEAT_S = 5.0

T = TypeVar("T")


class OnEngine:
    """Runs something on the engine's thread, between two steps."""

    def __init__(self, post: Callable[[Callable[[], Any]], Any]) -> None:
        self._post = post  # returns a concurrent future

    async def __call__(self, command: Callable[[], T]) -> T:
        """Its result."""
        result: T = await asyncio.wrap_future(self._post(command))
        return result


class BlockMap:
    """One worker's; all methods on one event loop."""

    def __init__(self, identity: Identity, scheduler: Scheduler, log: BlockMapLog, on_engine: OnEngine) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._log = log
        self._on_engine = on_engine
        self._watchers: set[Watcher] = set()
        self._came = asyncio.Event()  # a watcher, or went
        self._maker: asyncio.Task[None] | None = None

    @property
    def num_watchers(self) -> int:
        """Who watches now."""
        return len(self._watchers)

    async def watch(self, period_s: float) -> AsyncGenerator[bytes, None]:
        """Frames every `period_s` at most, or oftener where another watcher wants that; the first is whole.

        Raises:
            Overloaded: too many watch already.  RequestError: the period is too short.
        """
        if not period_s >= LEAST_PERIOD_S:
            raise RequestError(f"period_s is {period_s}; it must be at least {LEAST_PERIOD_S}.", param="period_s")
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} others watch the blocks of this worker already; close one of them first.")
        watcher = Watcher(period_s)
        self._watchers.add(watcher)
        self._came.set()
        if self._maker is None:
            # outside the first watcher's context: Serve must not end it with that call
            self._maker = asyncio.create_task(self._make_frames(), context=contextvars.Context())
        number = 0
        try:
            while True:
                frame = await watcher.next()
                yield frame.numbered(number)
                number += 1
        finally:
            self._watchers.discard(watcher)
            self._came.set()

    async def describe(self, group: int, block: int) -> dict[str, Any]:
        """One block now; see `describe_block`."""
        return await self._on_engine(lambda: describe_block(self._scheduler, group, block))

    async def _make_frames(self) -> None:
        """Until nobody watches. Whoever comes while it ends is served by another round."""
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
        snapshots = Snapshots(self._scheduler, self._log.events)
        try:
            frames = FrameMaker(self._log, snapshots, self._on_engine)
            layout, history = self._scheduler.cache.layout, self._log.history
            frames.encoder = await asyncio.to_thread(Encoder, self._identity, layout, history)
            await frames.begin(len(layout.groups))
            while self._watchers:
                self._came.clear()
                await frames.make(self._watchers, min(watcher.period_s for watcher in self._watchers))
                await self._pause(frames.due_s)
        finally:
            with contextlib.suppress(Exception):  # the engine may have ended
                await self._on_engine(snapshots.end)

    async def _pause(self, until_s: float) -> None:
        """Until the next picture is due, or a watcher came or went."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await self._came.wait()


class FrameMaker:
    """Makes one round of watchers' frames: what changed to those who follow, all of it to those who begin."""

    def __init__(self, log: BlockMapLog, snapshots: Snapshots, on_engine: OnEngine) -> None:
        self.encoder: Encoder
        self.due_s = 0.0  # when the next picture may be taken
        self._log = log
        self._snapshots = snapshots
        self._on_engine = on_engine
        self._num_seen = -1  # changes that the last picture shows
        self._told_s = 0.0  # the last frame

    async def begin(self, num_groups: int) -> None:
        """Copy all blocks, a group at a time: steps can run in between."""
        await self._on_engine(self._snapshots.begin)
        for group in range(num_groups):
            copy = await self._on_engine(functools.partial(self._snapshots.copy, group))
            await asyncio.to_thread(self.encoder.start, group, copy)

    async def make(self, watchers: set[Watcher], period_s: float) -> None:
        """One frame, if it is due and there is anything to tell; whole ones for those who want them."""
        begin_s = time.monotonic()
        if begin_s >= self.due_s:
            self.due_s = begin_s + period_s
            if (frame := await self._changes(begin_s)) is not None:
                self._told_s = begin_s
                for watcher in watchers:
                    watcher.give(frame, whole=False)
        if beginners := [watcher for watcher in watchers if watcher.wants_whole]:
            whole = await asyncio.to_thread(self.encoder.whole, time.time())
            for watcher in beginners:
                watcher.give(whole, whole=True)

    async def _changes(self, now_s: float) -> Any:
        if self._log.num_changes != self._num_seen:
            self._num_seen, snapshot = await self._on_engine(self._take)
            return await asyncio.to_thread(self.encoder.update, snapshot)
        if not self.encoder.is_settled or now_s - self._told_s >= HEARTBEAT_S:
            return await asyncio.to_thread(self.encoder.again, time.time())
        return None

    def _take(self) -> tuple[int, Snapshot]:
        return self._log.num_changes, self._snapshots.take()
