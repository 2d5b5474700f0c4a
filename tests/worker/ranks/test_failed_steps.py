"""Plans that raise: if every rank refuses the plan, the ranks go on; if only some do, all ranks are lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.engine_driver import make_engine, make_request, run
from transom_core.errors import RankLost, StepFailed
from transom_worker.engine.engine import Engine
from transom_worker.execution.ranks import ranks_executor as executor
from transom_worker.execution.ranks.channel import ExecutorChannel
from transom_worker.execution.ranks.messages import RunStep, decode, encode
from transom_worker.scheduling.step import StepPlan

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), device="cpu", tensor_parallel_size=2)
    yield engine
    engine.shutdown()


def test_a_plan_that_every_rank_refuses(engine: Engine) -> None:
    """Every rank drops the plans behind it, so that a later result is not taken for its result."""
    expected = run(engine, [make_request("before", PROMPT, max_tokens=4)])[0].token_ids
    executor = engine.executor
    executor.submit(StepPlan(step_id=1_000, version=99))
    executor.submit(StepPlan(step_id=1_001))
    with pytest.raises(StepFailed, match="version 99"):
        executor.receive()
    with pytest.raises(StepFailed, match="no plan was submitted"):
        executor.receive()
    assert run(engine, [make_request("after", PROMPT, max_tokens=4)])[0].token_ids == expected


def test_results_of_forgotten_plans_are_dropped(engine: Engine) -> None:
    """After an interrupt, ranks have run plans that the engine has forgotten."""
    executor = engine.executor
    executor.submit(StepPlan(step_id=2_000))
    executor.drop_in_flight()
    executor.submit(StepPlan(step_id=2_001))
    assert executor.receive().step_id == 2_001


def test_an_interrupt_while_a_plan_is_sent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has the plan and the other does not, so both must be restarted."""
    send = ExecutorChannel._send

    def send_and_interrupt(channel: ExecutorChannel, rank: int, frame: zmq.Frame) -> None:
        send(channel, rank, frame)
        raise KeyboardInterrupt

    expected = run(engine, [make_request("whole", PROMPT, max_tokens=4)])[0].token_ids
    engine.add(make_request("interrupted", PROMPT, max_tokens=4))
    monkeypatch.setattr(ExecutorChannel, "_send", send_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    engine.step()
    assert engine.is_restarting
    engine.step()
    assert run(engine, [make_request("again", PROMPT, max_tokens=4)])[0].token_ids == expected


def test_a_plan_that_one_rank_refuses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank began the plan and waits; the error names the refusing rank's reason."""
    send = ExecutorChannel._send

    def send_another(channel: ExecutorChannel, rank: int, frame: zmq.Frame) -> None:
        if rank == 1:
            step = decode(frame.bytes)
            frame = zmq.Frame(encode(RunStep(step.epoch, StepPlan(step_id=step.plan.step_id, version=99))))
        send(channel, rank, frame)

    engine.add(make_request("refused", PROMPT, max_tokens=4))
    monkeypatch.setattr(executor, "FAILURE_TIMEOUT_S", 1.0)  # the other rank never says anything
    monkeypatch.setattr(ExecutorChannel, "_send", send_another)
    (event,) = engine.step()
    monkeypatch.undo()
    assert event.error is not None
    assert event.error.kind == "WorkerLost"
    assert re.search("Rank 1 of 2: .*version 99", event.error.message)
    engine.step()
    assert len(run(engine, [make_request("again", PROMPT, max_tokens=4)])[0].token_ids) == 4


def test_a_plan_that_fails_in_the_middle(engine: Engine) -> None:
    executor = engine.executor
    engine.add(make_request("r", PROMPT))
    plan = engine.scheduler.schedule()
    assert plan is not None
    plan.logits_from = [plan.start[0] + plan.count[0]]  # and it is to sample
    executor.submit(plan)
    with pytest.raises(RankLost, match=r"Rank [01] of 2"):
        executor.receive()
    with pytest.raises(RankLost, match="not running"):
        executor.submit(StepPlan(step_id=3_000))
