"""A replica's methods without Ray Serve: streams, admission, aborts, and freed blocks."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.engine_driver import make_request, num_active
from tests.hooked_executor import HookedExecutor
from tests.present import present
from transom_core.contract import OutputEvent, Request, WorkerMessage
from transom_core.errors import EngineDead
from transom_core.settings.settings import Settings
from transom_worker.engine.engine_thread import LOAD_PERIOD_S
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica


@pytest.fixture(scope="module")
def replica(tiny_model: Path) -> WorkerReplica:
    settings = Settings.parse(model=str(tiny_model), kv_cache_memory_bytes="4MiB", max_num_seqs=4, max_waiting=8)
    config = settings.engine_config()
    return WorkerReplica(
        config, "tiny", engine=build_engine(config, model_name="tiny", executor=HookedExecutor(config))
    )


@pytest.fixture
def executor(replica: WorkerReplica) -> Iterator[HookedExecutor]:
    """The replica's executor, with which a test can interfere with the steps."""
    executor = replica.engine.executor
    assert isinstance(executor, HookedExecutor)
    yield executor
    executor.before_step = lambda: None


def request(request_id: str, *, num_prompt: int = 20, max_tokens: int = 8) -> Request:
    return make_request(request_id, list(range(5, 5 + num_prompt)), max_tokens=max_tokens)


async def collect(stream: AsyncIterator[WorkerMessage], ids: set[str]) -> dict[str, list[OutputEvent]]:
    events: dict[str, list[OutputEvent]] = {one: [] for one in ids}
    while not all(got and got[-1].finish_reason for got in events.values()):
        for event in (await anext(stream)).events:
            events[event.request_id].append(event)
    return events


@contextlib.asynccontextmanager
async def opened(replica: WorkerReplica, router: str = "r") -> AsyncIterator[AsyncGenerator[WorkerMessage, None]]:
    """A router's stream, after its first message."""
    async with contextlib.aclosing(replica.open_stream(router)) as stream:
        await anext(stream)
        yield stream


@contextlib.contextmanager
def held(executor: HookedExecutor, *, after_steps: int, step_s: float = 0.0) -> Iterator[None]:
    """The engine stops after some steps until the end, so that requests that run then do not finish. A step takes `step_s`."""
    release, steps = threading.Event(), itertools.count()

    def hold() -> None:
        time.sleep(step_s)
        if next(steps) == after_steps:
            assert release.wait(120)

    executor.before_step = hold
    try:
        yield
    finally:
        executor.before_step = lambda: None
        release.set()


async def test_events_of_each_router_come_on_its_own_stream(replica: WorkerReplica) -> None:
    streams = {router: replica.open_stream(router) for router in ("a", "b")}
    for router, stream in streams.items():
        first = await anext(stream)
        assert first.kv is not None
        assert first.kv.whole
        assert await replica.submit(router, [request(f"{router}{i}") for i in range(3)]) == [None] * 3
    for router, stream in streams.items():
        for got in (await collect(stream, {f"{router}{i}" for i in range(3)})).values():
            assert [event.position for event in got] == list(range(8))
            assert got[-1].finish_reason == "length"
            assert got[-1].usage is not None
            assert got[-1].usage.num_output_tokens == 8
        await stream.aclose()
    assert num_active(replica.engine) == 0


async def test_a_long_step_does_not_block_the_event_loop(replica: WorkerReplica, executor: HookedExecutor) -> None:
    """While a step is stuck, everything else that the replica is asked is answered."""
    entered, release = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert release.wait(60)

    async with opened(replica) as stream:
        executor.before_step = slow
        assert await replica.submit("r", [request("slow", max_tokens=2)]) == [None]
        assert await asyncio.to_thread(entered.wait, 60)
        assert (await replica.info()).vocab_size == 2048
        assert "transom_requests" in await replica.metrics_text()
        replica.check_health()
        release.set()
        assert len((await collect(stream, {"slow"}))["slow"]) == 2


async def test_the_autoscaler_sees_what_waits_and_what_runs(replica: WorkerReplica, executor: HookedExecutor) -> None:
    async with opened(replica) as stream:
        with held(executor, after_steps=10, step_s=LOAD_PERIOD_S / 2):
            assert await replica.submit("r", [request(f"s{i}", max_tokens=400) for i in range(6)]) == [None] * 6
            stats: dict[str, float] = {}
            while stats.get("num_running", 0) < 4:
                await anext(stream)
                stats = await replica.record_autoscaling_stats()
        assert all(isinstance(value, (int, float)) for value in stats.values())  # or Serve stops asking
        assert (stats["num_waiting"], stats["max_num_seqs"]) == (2, 4)
        assert stats["waiting_tokens"] > 0
        assert 0 < stats["used_share"] <= 1


async def test_without_a_stream_nothing_is_admitted(replica: WorkerReplica) -> None:
    (error,) = await replica.submit("no-such-router", [request("x")])
    assert present(error).kind == "EngineDead"


async def test_leaving_routers_and_aborts_free_blocks_at_once(replica: WorkerReplica) -> None:
    async with opened(replica) as stream:
        await replica.submit("r", [request(f"l{i}", max_tokens=400) for i in range(3)])
        assert await anext(stream)
        await replica.abort("r", ["l0"])
        await replica.abort("other", ["l1"])  # not its owner: ignored
    async with opened(replica, "r2") as again:
        assert await replica.submit("r2", [request("last", max_tokens=1)]) == [None]
        await collect(again, {"last"})
    assert num_active(replica.engine) == 0


async def test_an_id_in_use_is_refused_and_its_running_request_continues(
    replica: WorkerReplica, executor: HookedExecutor
) -> None:
    async with opened(replica, "a") as stream, opened(replica, "b"):
        with held(executor, after_steps=0):
            assert await replica.submit("a", [request("same", max_tokens=50)]) == [None]
            for router in ("a", "b"):
                fine, error = await replica.submit(router, [request("fine"), request("same")])
                assert fine is None
                assert present(error).param == "request_id"
            assert all(error is not None for error in await replica.submit("b", [request("twice"), request("twice")]))
        assert [event.position for event in (await collect(stream, {"same"}))["same"]] == list(range(50))
    assert replica.num_requests == 0


async def test_a_cancelled_submission_leaves_nothing_behind(replica: WorkerReplica) -> None:
    async with opened(replica) as stream:
        leaving = asyncio.create_task(replica.submit("r", [request("left", max_tokens=400)]))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert replica.num_requests == 0
        assert await replica.submit("r", [request("last", max_tokens=1)]) == [None]
        await collect(stream, {"last"})
    assert num_active(replica.engine) == 0


async def test_a_replica_that_stops_has_written_its_cache_to_the_disk_tier(tiny_model: Path, tmp_path: Path) -> None:
    settings = Settings.parse(
        model=str(tiny_model), kv_cache_memory_bytes="4MiB", swap_space="1MiB", disk_cache=str(tmp_path), device="cpu"
    )
    stopping = WorkerReplica(settings.engine_config(), "tiny")
    async with opened(stopping) as stream:
        assert await stopping.submit("r", [request("kept", num_prompt=100)]) == [None]
        await collect(stream, {"kept"})
    assert list(tmp_path.rglob("*.kv")) == []
    await stopping.stop()
    assert len(list(tmp_path.rglob("*.kv"))) == 6  # whole hash blocks of 107 computed tokens


async def test_a_newer_stream_ends_the_older(replica: WorkerReplica) -> None:
    async with opened(replica) as old, opened(replica) as new:
        async with asyncio.timeout(10):
            async for message in old:
                assert not message.events
        assert await replica.submit("r", [request("n", max_tokens=2)]) == [None]
        await collect(new, {"n"})


async def test_a_stream_of_several_calls_brings_every_event_once(
    replica: WorkerReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends a call after some messages, and the router's next call continues the stream, in which a request runs on."""
    monkeypatch.setattr("transom_worker.replica.MAX_CALL_MESSAGES", 1)
    got: list[OutputEvent] = []
    num_calls = num_whole = 0
    while not (got and got[-1].finish_reason):
        num_messages = 0
        async with contextlib.aclosing(replica.open_stream("r", resumes=num_calls > 0)) as stream:
            async for message in stream:
                if num_calls == num_messages == 0:
                    assert await replica.submit("r", [request("long", max_tokens=40)]) == [None]
                num_messages += 1
                num_whole += message.kv is not None and message.kv.whole
                got += message.events
                if got and got[-1].finish_reason:
                    break
            else:
                assert num_messages == 1
        num_calls += 1
    assert [event.position for event in got] == list(range(40))
    assert num_whole == 1
    assert num_calls > 1  # the first one brings the index alone


async def test_a_stream_that_no_call_continues_ends(
    replica: WorkerReplica, executor: HookedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its router was killed between two calls. A call that comes later gets nothing, so a router sees that the stream ended."""
    monkeypatch.setattr("transom_worker.replica.MAX_CALL_MESSAGES", 1)
    monkeypatch.setattr("transom_worker.replica.SILENT_ROUTER_S", 0.05)
    with held(executor, after_steps=2):
        async for _ in replica.open_stream("killed"):
            assert await replica.submit("killed", [request("left", max_tokens=400)]) == [None]
        async with asyncio.timeout(60):
            while replica.num_requests:
                await asyncio.sleep(0.01)
    assert [message async for message in replica.open_stream("killed", resumes=True)] == []


async def test_a_router_that_was_killed_leaves_no_stream_and_no_request(
    replica: WorkerReplica, executor: HookedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams are not closed, and are read on as Ray does. A call shows that a router is there, even one without a request."""
    monkeypatch.setattr("transom_worker.engine.router_outbox.SILENT_ROUTER_S", 1.0)
    monkeypatch.setattr("transom_worker.engine.router_outbox.HEARTBEAT_S", 0.05)
    async with opened(replica, "living") as living, opened(replica, "killed") as killed:
        frames = replica.watch_blocks("killed", 0.1)
        assert await anext(frames)
        with held(executor, after_steps=2):
            assert await replica.submit("killed", [request("left", max_tokens=400)]) == [None]
            async with asyncio.timeout(60):
                async for _ in killed:
                    await replica.abort("living", [])
        assert replica.num_requests == 0
        async with asyncio.timeout(60):
            async for _ in frames:
                pass
        assert not replica.block_map._watchers
        monkeypatch.setattr("transom_worker.replica.MAX_CALL_MESSAGES", 1)
        assert len([frame async for frame in replica.watch_blocks("living", 0.1)]) == 1
        assert await replica.submit("living", [request("more", max_tokens=2)]) == [None]
        await collect(living, {"more"})
    assert num_active(replica.engine) == 0


async def test_a_failing_step_ends_every_request_and_fails_the_health_check(
    replica: WorkerReplica, executor: HookedExecutor
) -> None:
    def fail() -> None:
        raise RuntimeError("the device fell over")

    async with opened(replica) as stream:
        executor.before_step = fail
        assert await replica.submit("r", [request("doomed")]) == [None]
        (event,) = (await collect(stream, {"doomed"}))["doomed"]
        assert "fell over" in present(event.error).message
        for _ in range(2):  # the traceback of an exception that is raised again would grow
            with pytest.raises(EngineDead) as dead:
                replica.check_health()
            assert isinstance(dead.value.__cause__, RuntimeError)
            assert len(dead.traceback) == 2
        (refused,) = await replica.submit("r", [request("late")])
        assert present(refused).kind == "EngineDead"
