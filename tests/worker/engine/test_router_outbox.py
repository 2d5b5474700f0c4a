"""When a router's next message is due, by a clock of the test's own, and what it carries."""

import asyncio
import math
from dataclasses import replace

import pytest

from tests.present import present
from transom_core.contract import OutputEvent, WorkerLoad, WorkerMessage
from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_worker.engine.router_outbox import HEARTBEAT_S, NEWS_PERIOD_S, SILENT_ROUTER_S, RouterOutbox, is_news
from transom_worker.simulate.replay import VirtualClock

IDLE = WorkerLoad(max_num_seqs=16, prefill_tokens_per_s=5000.0, decode_step_s=0.02)
BUSY = replace(IDLE, num_running=8, num_waiting=2, waiting_tokens=4000, used_share=0.5)
WHOLE = KvUpdate(after=0, version=0, runs=(), whole=True)


def event(request_id: str = "r") -> OutputEvent:
    return OutputEvent(request_id=request_id, position=0, token_ids=(1,), text="a")


def change(version: int) -> KvUpdate:
    return KvUpdate(after=version - 1, version=version, runs=(KvRun("added", 0, (version.to_bytes(32, "big"),)),))


def opened(clock: VirtualClock, load: WorkerLoad = IDLE) -> RouterOutbox:
    """An outbox whose first message was sent just now."""
    outbox = RouterOutbox(clock)
    outbox.put(WorkerMessage(kv=WHOLE, load=load))
    assert outbox.due_s() == -math.inf
    first = outbox.take()
    assert (first.kv, first.load) == (WHOLE, load)
    return outbox


async def begun(outbox: RouterOutbox) -> asyncio.Task[WorkerMessage | None]:
    """A reader that waits for the next message."""
    reading = asyncio.create_task(outbox.receive())
    await asyncio.sleep(0)
    return reading


def test_events_are_due_at_once_and_take_all_news_with_them() -> None:
    clock = VirtualClock()
    outbox = opened(clock)
    outbox.put(WorkerMessage(kv=change(1), load=BUSY, taken=("r",)))
    assert outbox.due_s() == clock.now_s + NEWS_PERIOD_S
    outbox.put(WorkerMessage(kv=change(2), events=(event(),)))
    assert outbox.due_s() == -math.inf
    message = outbox.take()
    assert (message.events, message.load, message.taken) == ((event(),), BUSY, ("r",))
    assert (present(message.kv).after, present(message.kv).version) == (0, 2)
    assert outbox.due_s() == clock.now_s + HEARTBEAT_S


def test_a_busy_worker_sends_a_router_without_requests_a_message_a_second_and_an_idle_one_heartbeats() -> None:
    clock = VirtualClock()
    outbox = opened(clock)
    num_messages = 0
    for version in range(1, 50 * 60):  # a minute of steps of 20 ms, each of which changes index and load
        clock.now_s += 0.02
        outbox.put(WorkerMessage(kv=change(version), load=replace(BUSY, waiting_tokens=4000 * (version % 2))))
        if outbox.due_s() <= clock.now_s:
            assert outbox.take().kv is not None
            num_messages += 1
    assert num_messages == pytest.approx(60 / NEWS_PERIOD_S, rel=0.05)
    outbox.put(WorkerMessage(load=IDLE))
    clock.now_s = outbox.due_s()
    assert outbox.take().load == IDLE
    assert outbox.due_s() == clock.now_s + HEARTBEAT_S
    clock.now_s += HEARTBEAT_S
    assert outbox.take() == WorkerMessage()


def test_changes_add_up_until_they_are_news() -> None:
    """A load is compared with the one that was sent, not with the one before it."""
    outbox = opened(VirtualClock(), BUSY)
    for num_tokens in (4200, 4400, 4600):
        outbox.put(WorkerMessage(load=replace(BUSY, waiting_tokens=num_tokens)))
    assert outbox.due_s() == NEWS_PERIOD_S


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_running": 9}, False),
        ({"num_running": 10}, True),
        ({"waiting_tokens": 4500}, False),
        ({"waiting_tokens": 4501}, True),
        ({"used_share": 0.6}, False),
        ({"used_share": 0.65}, True),
        ({"max_num_seqs": 8}, True),
        ({"prefill_tokens_per_s": 6000.0}, False),
        ({"prefill_tokens_per_s": 6300.0}, True),
        ({"decode_step_s": 0.015}, True),
        ({"first_token_s": 9.0}, False),
        ({"num_running": 0, "num_waiting": 0}, True),
    ],
)
def test_a_load_is_news_when_routers_would_judge_the_worker_differently(
    changed: dict[str, float], expected: bool
) -> None:
    assert is_news(BUSY, replace(BUSY, **changed)) == expected  # type: ignore[arg-type]
    assert is_news(IDLE, replace(IDLE, num_running=1))


async def test_a_reader_gets_what_is_due_in_one_message_and_ends_when_the_outbox_is_closed() -> None:
    outbox = RouterOutbox()
    reading = await begun(outbox)
    outbox.put(WorkerMessage(kv=WHOLE, load=IDLE))
    assert (await reading) == WorkerMessage(kv=WHOLE, load=IDLE)
    reading = await begun(outbox)
    outbox.put(WorkerMessage(events=(event("a"),)))
    outbox.put(WorkerMessage(events=(event("b"),)))  # before the reader runs
    assert present(await reading).events == (event("a"), event("b"))
    reading = await begun(outbox)
    outbox.close()
    assert await reading is None


async def test_the_stream_of_a_router_that_is_silent_ends() -> None:
    clock = VirtualClock()
    outbox = opened(clock)
    clock.now_s += SILENT_ROUTER_S - 1
    outbox.hear()
    clock.now_s += SILENT_ROUTER_S - 1
    assert await outbox.receive() is not None
    clock.now_s += 1
    assert await outbox.receive() is None


async def test_a_reader_is_woken_when_news_gets_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transom_worker.engine.router_outbox.NEWS_PERIOD_S", 0.01)
    outbox = RouterOutbox()
    outbox.put(WorkerMessage(kv=WHOLE, load=IDLE))
    await outbox.receive()
    reading = await begun(outbox)
    outbox.put(WorkerMessage(load=BUSY))
    assert present(await asyncio.wait_for(reading, 60)).load == BUSY
