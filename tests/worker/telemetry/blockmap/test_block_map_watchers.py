"""Watchers: each gets a whole frame and then changes; slow ones pile up no frames, and without watchers nothing is kept."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

import pytest

from tests.block_map_decoder import Map, decode
from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.errors import Overloaded, RequestError
from transom_worker.telemetry.blockmap.block_map import HEARTBEAT_S, MAX_PENDING, MAX_WATCHERS, BlockMap
from transom_worker.telemetry.blockmap.encoder import WorkerIdentity
from transom_worker.telemetry.blockmap.log import BlockMapLog

T = TypeVar("T")

PERIOD_S = 0.001
PROMPT = list(range(30))


class Worker:
    """A scheduler without a thread: what is to run on the engine's thread runs at once."""

    def __init__(self, *, num_pages: int = 60, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.driver = Driver(layout(("full", "window"), num_pages=num_pages), max_num_batched_tokens=64)
        self.log = BlockMapLog()
        self.scheduler = self.driver.scheduler
        self.scheduler.admission.listeners.append(self.log)
        self.num_commands = 0
        self.map = BlockMap(
            WorkerIdentity("w0", "tiny"),
            self.scheduler,
            self.log,
            self._on_engine,
            least_period_s=PERIOD_S,
            heartbeat_s=heartbeat_s,
        )

    def step(self) -> None:
        self.driver.step()
        self.log.num_changes += 1

    def run(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 4) -> None:
        """A request from its beginning to its end."""
        self.driver.add(request(name, prompt, max_tokens))
        while self.scheduler.has_work:
            self.step()

    @property
    def keeps_nothing(self) -> bool:
        return self.scheduler.cache.registry._touched is None and not self.log.is_watched

    async def _on_engine(self, function: Callable[[], T]) -> T:
        self.num_commands += 1
        return function()


@contextlib.asynccontextmanager
async def watching(worker: Worker) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    async with contextlib.aclosing(worker.map.watch(PERIOD_S)) as frames:
        yield frames


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.0005)


async def follow(frames: AsyncGenerator[bytes, None], seen: Map, condition: Callable[[], object]) -> None:
    """Take frames until `condition` holds."""
    async with asyncio.timeout(120):
        while not condition():
            seen.take(await anext(frames))


async def test_the_first_frame_is_whole_and_later_ones_are_not() -> None:
    worker, seen = Worker(), Map()
    async with watching(worker) as frames:
        first = seen.take(await anext(frames)).header
        assert (first["whole"], first["sequence"], first["worker"], first["model"]) == (True, 0, "w0", "tiny")
        assert [group["kind"] for group in first["groups"]] == ["full", "window"]
        worker.driver.add(request("a", PROMPT, 4))
        worker.step()
        second = seen.take(await anext(frames)).header
        assert (second["whole"], second["sequence"]) == (False, 1)
        assert [sequence["request"] for sequence in second["sequences"]] == ["a"]
        assert [event["kind"] for event in second["events"]] == ["admitted"]
        while worker.scheduler.has_work:
            worker.step()
        await follow(frames, seen, lambda: not seen.sequences)
    await until(lambda: worker.keeps_nothing)


async def test_a_slow_watcher_gets_a_whole_frame_instead_of_all_that_it_missed() -> None:
    worker, slow, quick = Worker(num_pages=400), Map(), Map()
    async with watching(worker) as frames, watching(worker) as others:
        slow.take(await anext(frames))
        quick.take(await anext(others))
        for number in range(3 * MAX_PENDING):
            worker.run(f"r{number}", [number, *PROMPT])
            quick.take(await anext(others))
        wholes = 0
        while slow.shown != quick.shown:
            wholes += slow.take(await anext(frames)).header["whole"]
        assert wholes == 1
        assert slow.next_sequence <= 2 + MAX_PENDING


async def test_an_idle_engine_gets_no_commands() -> None:
    worker, seen = Worker(heartbeat_s=0.02), Map()
    worker.run("a")
    async with watching(worker) as frames:
        seen.take(await anext(frames))
        commands = worker.num_commands
        for _ in range(3):
            beat = seen.take(await anext(frames))
            assert (beat.blocks, beat.pages, beat.header["sequences"]) == ({}, [], [])
        assert worker.num_commands == commands == 1 + 2 + 1  # to begin, two groups, one snapshot


async def test_too_many_watchers_are_refused() -> None:
    worker = Worker()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_WATCHERS):
            await anext(await stack.enter_async_context(watching(worker)))
        with pytest.raises(Overloaded, match=f"{MAX_WATCHERS} others watch"):
            await anext(worker.map.watch(PERIOD_S))
    async with watching(worker) as frames:  # all have gone
        assert decode(await anext(frames)).header["whole"]


@pytest.mark.parametrize("period_s", [0.0, -1.0, PERIOD_S / 2, float("nan")])
async def test_periods_that_are_too_short_are_refused(period_s: float) -> None:
    with pytest.raises(RequestError, match="at least"):
        await anext(Worker().map.watch(period_s))


async def test_a_failure_ends_all_watchers_and_the_next_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    async with watching(worker) as frames:
        await anext(frames)
        with monkeypatch.context() as broken:
            broken.setattr(worker.scheduler, "sequences_with_blocks", lambda: [][0])
            worker.log.num_changes += 1
            with pytest.raises(IndexError):
                await anext(frames)
    await until(lambda: worker.keeps_nothing)
    async with watching(worker) as frames:
        assert decode(await anext(frames)).header["whole"]
