"""The engine's thread: cancelled callers do not end it, and its end gives every request an error event."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import (
    WAIT_S,
    OnThread,
    make_engine,
    make_hooked_engine,
    make_request,
    unusable_request,
)
from transom_core.contract import OutputEvent
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_worker.kvcache.tiers.exports import BlockExport


@pytest.fixture
def harness(tiny_model: Path) -> Iterator[OnThread]:
    harness = OnThread(make_hooked_engine(str(tiny_model))[0])
    yield harness
    harness.thread.shutdown()


async def test_a_caller_that_is_cancelled_does_not_end_the_thread(harness: OnThread) -> None:
    busy = threading.Event()
    harness.thread.call(lambda: busy.wait(WAIT_S))  # the thread waits, and the next command stays in the inbox
    waiting = asyncio.wrap_future(harness.thread.submit([make_request("left", [5, 6])]))
    waiting.cancel()
    await asyncio.sleep(0)
    busy.set()
    admitted = harness.thread.submit([make_request("stays", [5, 6], max_tokens=2)])
    assert admitted.result(WAIT_S) == [None]
    assert harness.last_event("stays").finish_reason == "length"
    assert harness.thread.dead is None


def test_a_request_that_breaks_admission_is_refused_alone(harness: OnThread) -> None:
    (error,) = harness.submit(unusable_request("odd"))
    assert error is not None
    assert (error.kind, error.message) == ("StepFailed", "not a number")
    assert harness.submit(make_request("fine", [5], max_tokens=1)) == [None]
    assert harness.last_event("fine").finish_reason == "length"


@pytest.mark.parametrize("failing", ["step", "abort"])
def test_a_thread_that_fails_ends_every_request_with_an_error(
    harness: OnThread, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an invariant is broken")

    monkeypatch.setattr(harness.engine, "step", lambda *_: [])  # makes no event, so that the request still runs then
    monkeypatch.setattr(harness.engine, failing, fail)
    assert harness.submit(make_request("running", [5, 6], max_tokens=1000)) == [None]
    harness.thread.abort(["anything"])
    event = harness.last_event("running")
    assert event.error is not None
    assert event.error.kind == "EngineDead"
    assert "an invariant is broken" in event.error.message
    assert harness.thread.dead is not None
    (error,) = harness.submit(make_request("late", [5]))
    assert error is not None
    assert error.kind == "EngineDead"


def test_shutdown_ends_running_and_later_requests_with_an_error(
    harness: OnThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        harness.engine.executor, "before_step", lambda: time.sleep(0.01)
    )  # so that the request still runs
    assert harness.submit(make_request("running", [5, 6], max_tokens=1500)) == [None]
    harness.thread.shutdown()
    event = harness.last_event("running")
    assert event.error is not None
    assert "shutting down" in event.error.message
    (error,) = harness.submit(make_request("late", [5]))
    assert error is not None
    assert error.kind == "EngineDead"
    harness.thread.shutdown()


def test_a_load_names_the_requests_that_it_counts_first_and_comes_with_first_tokens_and_ends(harness: OnThread) -> None:
    names = [f"r{at}" for at in range(3)]
    assert harness.submit(*(make_request(one, [5, 6, 7], max_tokens=5) for one in names))
    refused = harness.submit(make_request("fine", [5], max_tokens=1), unusable_request("odd"))
    assert any(refused)
    messages, ended = [], 0
    while ended < len(names):
        messages.append(harness.delivered.get(timeout=WAIT_S))
        ended += sum(event.finish_reason is not None for event in messages[-1].events)
    taken = [name for message in messages for name in message.taken]
    assert taken == names  # each once; a refused submission's are not
    for message in messages:
        if any(event.usage is not None for event in message.events):
            assert message.load is not None
        assert not message.taken or message.load is not None
    assert messages[-1].load is not None
    assert messages[-1].load.num_running == 0


def test_an_engine_that_waits_for_an_export_sleeps_until_it_ends(tiny_model: Path) -> None:
    """Another worker reads nearly all blocks of the device: the next request has no place until then, and no step is tried."""
    engine = make_engine(
        str(tiny_model),
        device="cpu",
        block_size=8,
        max_model_len=256,
        kv_cache_memory_bytes=300 << 10,
        swap_space="1MiB",
    )

    num_steps, asleep, step = [0], threading.Event(), engine.step

    def counted(*deliver: Any) -> list[OutputEvent]:
        num_steps[0] += 1
        return step(*deliver)

    engine.step = counted  # type: ignore[method-assign, assignment]
    harness = OnThread(engine)
    thread, sleep = harness.thread, harness.thread._sleep

    def noted(timeout_s: float | None) -> None:
        if timeout_s is not None:
            asleep.set()
        sleep(timeout_s)

    thread._sleep = noted  # type: ignore[method-assign]
    prompt = [5 + i % 90 for i in range(240)]
    harness.submit(make_request("first", prompt, max_tokens=2))
    harness.last_event("first")
    cache = engine.scheduler.cache

    def export() -> BlockExport | None:
        chain: list[bytes] = []
        extend_chain(chain, chain_root(8, identity=cache.identity), prompt, 8)
        return cache.tiers.exports.begin(chain, cache.find(chain, len(prompt)))

    opened = thread.call(export).result(WAIT_S)
    assert opened is not None
    harness.submit(make_request("second", prompt[::-1], max_tokens=2))
    assert asleep.wait(WAIT_S)
    before = num_steps[0]
    assert thread.call(lambda: num_steps[0]).result(WAIT_S) <= before + 1
    thread.call(lambda: cache.tiers.exports.end(opened)).result(WAIT_S)
    harness.last_event("second")
    thread.shutdown()
