"""The engine's thread: cancelled callers do not end it, and its end gives every request an error event. Groups of requests come in
pieces: none holds a step, none stands before another client's, all or none run."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import WAIT_S, OnThread, make_engine, make_hooked_engine, make_request, unusable_request
from tests.prefix_chains import chain_of
from tests.present import present
from tests.worker.conftest import Start
from transom_core.contract import ErrorInfo, OutputEvent, Request
from transom_core.errors import Overloaded
from transom_worker.engine.arrivals import MAX_PIECE, Arrivals, Group
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
    assert harness.thread.submit([make_request("stays", [5, 6], max_tokens=2)]).result(WAIT_S) == [None]
    assert harness.last_event("stays").finish_reason == "length"
    assert harness.thread.dead is None


def test_a_request_that_breaks_admission_is_refused_alone(harness: OnThread) -> None:
    (error,) = harness.submit(unusable_request("odd"))
    assert (present(error).kind, present(error).message) == ("StepFailed", "not a number")
    assert harness.submit(make_request("fine", [5], max_tokens=1)) == [None]
    assert harness.last_event("fine").finish_reason == "length"


@pytest.mark.parametrize("failing", ["step", "abort", "nothing: it is shut down"])
def test_a_thread_that_ends_ends_every_request_with_an_error(
    harness: OnThread, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an invariant is broken")

    monkeypatch.setattr(harness.engine, "step", lambda *_: [])  # makes no event, so that the request still runs then
    is_shut_down = failing.startswith("nothing")
    if not is_shut_down:
        monkeypatch.setattr(harness.engine, failing, fail)
    assert harness.submit(make_request("running", [5, 6], max_tokens=1000)) == [None]
    harness.thread.abort(["anything"])
    if is_shut_down:
        harness.thread.shutdown()
    error = present(harness.last_event("running").error)
    assert error.kind == "EngineDead"
    assert ("shutting down" if is_shut_down else "an invariant is broken") in error.message
    assert harness.thread.dead is not None
    (late,) = harness.submit(make_request("late", [5]))
    assert present(late).kind == "EngineDead"


def test_a_load_names_the_requests_that_it_counts_first_and_comes_with_first_tokens_and_ends(harness: OnThread) -> None:
    names = [f"r{at}" for at in range(3)]
    assert harness.submit(*(make_request(one, [5, 6, 7], max_tokens=5) for one in names))
    assert any(harness.submit(make_request("fine", [5], max_tokens=1), unusable_request("odd")))
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
    assert present(messages[-1].load).num_running == 0


def test_an_engine_that_waits_for_an_export_sleeps_until_it_ends(tiny_model: Path) -> None:
    """Another worker reads nearly all blocks of the device: the next request has no place until then, and no step is tried."""
    sizes: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "kv_cache_memory_bytes": 300 << 10}
    engine = make_engine(str(tiny_model), device="cpu", swap_space="1MiB", **sizes)
    num_steps, asleep, step = [0], threading.Event(), engine.step

    def counted(*deliver: Any) -> list[OutputEvent]:
        num_steps[0] += 1
        return step(*deliver)

    engine.step = counted  # type: ignore[method-assign, assignment]
    harness = OnThread(engine)
    thread, sleep = harness.thread, harness.thread._sleep

    def noted(timeout_s: float | None) -> bool:
        if timeout_s is not None:
            asleep.set()
        return sleep(timeout_s)

    thread._sleep = noted  # type: ignore[method-assign]
    prompt = [5 + i % 90 for i in range(240)]
    harness.submit(make_request("first", prompt, max_tokens=2))
    harness.last_event("first")
    cache = engine.scheduler.cache

    def export() -> BlockExport | None:
        chain = chain_of(prompt, 8, identity=cache.identity)
        return cache.tiers.exports.begin(chain, cache.find(chain, len(prompt)))

    opened = present(thread.call(export).result(WAIT_S))
    harness.submit(make_request("second", prompt[::-1], max_tokens=2))
    assert asleep.wait(WAIT_S)
    before = num_steps[0]
    assert thread.call(lambda: num_steps[0]).result(WAIT_S) <= before + 1
    thread.call(lambda: cache.tiers.exports.end(opened)).result(WAIT_S)
    harness.last_event("second")
    thread.shutdown()


REFUSED = ErrorInfo.of(Overloaded("full"))


class Engine:
    """Notes what is added, and refuses what the test names."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.ended: list[Group] = []
        self.refuses = ""
        self.arrivals = Arrivals(self._add, self.ended.append)

    def _add(self, group: Group, request: Request) -> ErrorInfo | None:
        self.added.append(request.request_id)
        return REFUSED if request.request_id == self.refuses else None

    def submit(self, client: str, count: int, *, num_tokens: int = 1, name: str = "") -> Group:
        item = replace(make_request("", [1] * num_tokens), client=client)
        requests = [replace(item, request_id=f"{client}{name}{number}") for number in range(count)]
        group = Group(requests=requests, arrival_s=0.0, fetched=(), future=Future())
        self.arrivals.add(group)
        return group

    def turn(self) -> list[str]:
        """Return what one more turn of the loop adds."""
        before = len(self.added)
        self.arrivals.next_turn()
        return self.added[before:]


def test_a_large_group_is_added_in_pieces_and_held_until_it_is_there() -> None:
    engine = Engine()
    group = engine.submit("a", 3 * MAX_PIECE + 1)
    assert [len(engine.turn()) for _ in range(5)] == [MAX_PIECE] * 3 + [1, 0]
    assert group.is_held
    assert engine.ended == [group]
    whole = engine.submit("a", MAX_PIECE)
    assert len(engine.turn()) == MAX_PIECE
    assert not whole.is_held
    for name in "xyz":
        engine.submit("a", 1, num_tokens=40_000, name=name)
    assert len(engine.turn()) == 2  # long prompts count, too
    assert engine.arrivals.is_busy


def test_clients_take_turns() -> None:
    engine = Engine()
    for _ in range(3):
        engine.submit("a", 1000)
    engine.turn()
    engine.submit("b", 2)
    assert {"b0", "b1"} <= set(engine.turn())  # the turn after it has come, although A has more than a turn
    engine.submit("c", 100)
    assert sum(name.startswith("c") for name in engine.turn()) == MAX_PIECE // 2


def test_a_group_that_is_left_or_refused_is_not_added_to_the_end() -> None:
    engine = Engine()
    left = engine.submit("a", 100)
    engine.turn()
    for request in left.requests:
        engine.arrivals.abort(request.request_id)
    engine.arrivals.abort("unknown")
    engine.refuses = "b40"
    refused = engine.submit("b", 100)
    assert len(engine.turn()) == MAX_PIECE  # none of which is an aborted request
    assert engine.ended == [left]
    engine.arrivals.flush()
    assert engine.ended == [left, refused]
    assert [name for name in engine.added if name[0] == "a"] == [f"a{number}" for number in range(MAX_PIECE)]
    assert len(engine.added) <= 32 + 41 + MAX_PIECE
    assert refused.results == [REFUSED if number == 40 else None for number in range(100)]
    assert left.results == [None] * 100


def test_a_request_with_the_id_of_an_aborted_one_can_be_aborted_too() -> None:
    engine = Engine()
    engine.submit("a", 1)
    engine.arrivals.abort("a0")
    engine.submit("a", MAX_PIECE, name="-")
    engine.submit("a", 1)
    assert len(engine.turn()) == MAX_PIECE  # the second request with the id waits
    engine.arrivals.abort("a0")
    assert engine.turn() == []


def test_what_waits_to_be_added_is_bounded_and_each_client_has_its_share() -> None:
    engine = Engine()
    for number in range(8):
        engine.submit("a", 1024, name=f"{number}-")
    refused = engine.submit("a", 1024)
    assert engine.ended == [refused]
    assert present(refused.results[0]).kind == "Overloaded"
    engine.submit("b", 1024)
    assert engine.ended == [refused]


def test_a_stream_goes_on_between_the_pieces_of_another_client_s_group(start: Start) -> None:
    """The audit's attack: one POST of 1,024 prompts. Before, no step ran before the last of them was added."""
    engine = start(max_waiting=2000)
    order: list[str] = []

    def noted(name: str, *args: Any, method: Callable[..., object], **options: object) -> object:
        order.append(name)
        return method(*args, **options)

    for name in ("add", "step"):
        setattr(engine, name, partial(noted, name, method=getattr(engine, name)))
    on_thread = OnThread(engine)
    thread = on_thread.thread
    try:
        on_thread.submit(replace(make_request("victim", [5, 6], max_tokens=100), client="victim"))
        prompts = [replace(make_request(f"h{number}", [7], max_tokens=1), client="hostile") for number in range(300)]
        assert on_thread.submit(*prompts) == [None] * 300
        long = replace(prompts[0].params, max_tokens=500)
        left = [replace(one, request_id=f"left {one.request_id}", params=long) for one in prompts]
        future = thread.submit(left)
        thread.abort([one.request_id for one in left])  # while most of them are still to be added
        assert future.result(WAIT_S) == [None] * 300
        ended = set()
        while len(ended) < 301:
            events = on_thread.delivered.get(timeout=WAIT_S).events
            ended |= {event.request_id for event in events if event.finish_reason}
        assert ended == {"victim", *(one.request_id for one in prompts)}
    finally:
        thread.shutdown()
    assert max(len(piece.split()) for piece in " ".join(order).split("step")) <= MAX_PIECE
