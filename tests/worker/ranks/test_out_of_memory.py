"""Ranks that run out of memory: before the first collective all ranks go on; one rank alone has all of them restarted.

In both cases the request that asked for the most ends, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.engine_driver import make_engine, make_request, run
from tests.worker.ranks.rank_watch import process_ids
from transom_worker.engine.engine import Engine
from transom_worker.execution.ranks import ranks_executor as executor
from transom_worker.execution.ranks.channel import ExecutorChannel
from transom_worker.execution.ranks.messages import RunStep, decode, encode

SHORT, LONG = list(range(5, 15)), list(range(40, 90))
FAR_TOO_MANY = 2**45  # tokens: no address space holds their positions


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), device="cpu", tensor_parallel_size=2, steps_in_flight=2)
    yield engine
    engine.shutdown()


def enlarge_first_step(monkeypatch: pytest.MonkeyPatch, is_for: Callable[[int], bool]) -> None:
    """Have the ranks `is_for` compute far too many tokens in the next step."""
    send, enlarged = ExecutorChannel._send, set[int]()

    def send_enlarged(channel: ExecutorChannel, rank: int, frame: zmq.Frame) -> None:
        step = decode(frame.bytes)
        if isinstance(step, RunStep) and is_for(rank) and rank not in enlarged:
            enlarged.add(rank)
            counts = [FAR_TOO_MANY, *step.plan.count[1:]]
            frame = zmq.Frame(encode(RunStep(step.epoch, replace(step.plan, count=counts))))
        send(channel, rank, frame)

    monkeypatch.setattr(ExecutorChannel, "_send", send_enlarged)


def test_all_ranks_before_the_first_collective(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine, [make_request("calm", SHORT, max_tokens=6)])[0].token_ids
    processes = process_ids(engine)
    enlarge_first_step(monkeypatch, lambda rank: True)
    engine.add(make_request("short", SHORT, max_tokens=6))
    engine.add(make_request("long", LONG, max_tokens=6))
    tokens, errors = [], {}
    while engine.has_work:
        for event in engine.step():
            tokens += event.token_ids
            if event.error is not None:
                errors[event.request_id] = event.error.kind
    assert errors == {"long": "OutOfMemory"}
    assert tokens == expected
    assert process_ids(engine) == processes
    assert sum(group.active_blocks for group in engine.scheduler.stats().groups) == 0


def test_one_rank_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has begun the step and waits, so the ranks start again; short ones migrate, the long one does not."""
    expected = run(engine, [make_request("calm", SHORT, max_tokens=6)])[0].token_ids
    monkeypatch.setattr(executor, "FAILURE_TIMEOUT_S", 1.0)  # the other rank never says anything
    enlarge_first_step(monkeypatch, lambda rank: rank == 1)
    engine.add(make_request("short", SHORT, max_tokens=6))
    engine.add(make_request("long", LONG, max_tokens=6))
    errors = {event.request_id: event.error for event in engine.step() if event.error}
    monkeypatch.undo()
    assert {request_id: error.kind for request_id, error in errors.items()} == {
        "long": "OutOfMemory",
        "short": "WorkerLost",
    }
    assert "asked for the most" in errors["long"].message
    engine.step()
    assert run(engine, [make_request("again", SHORT, max_tokens=6)])[0].token_ids == expected
