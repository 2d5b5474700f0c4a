"""Plans that raise: if every rank refuses the plan, the ranks go on; if some do, all are lost.

If memory was short, the request that asked for the most ends, and no other. All tests share one start of the ranks.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.engine_driver import make_engine, make_request, run
from tests.worker.ranks.rank_watch import process_ids
from transom_core.errors import RankLost
from transom_worker.engine.engine import Engine
from transom_worker.execution.ranks import ranks_executor as executor
from transom_worker.execution.ranks.channel import ExecutorChannel
from transom_worker.execution.ranks.messages import RunStep, decode, encode
from transom_worker.scheduling.step import StepPlan

PROMPT = list(range(5, 45))
SHORT, LONG = list(range(5, 15)), list(range(40, 90))
FAR_TOO_MANY = 2**45  # tokens: no address space holds their positions


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), device="cpu", tensor_parallel_size=2, steps_in_flight=2)
    yield engine
    engine.shutdown()


def test_every_rank_reports_its_usage(engine: Engine) -> None:
    """First of the tests here, before ranks have anything to report."""
    executor = engine.executor
    assert [report.usage.busy_s for report in executor.rank_reports()] == [0.0, 0.0]
    run(engine, [make_request("a", list(range(5, 45)), max_tokens=4)])
    give_up_s, step_ids = time.monotonic() + 120, itertools.count(1_000)
    # The first report of a rank is on its way.
    while not all(report.usage.busy_s for report in executor.rank_reports()):
        assert time.monotonic() < give_up_s
        executor.submit(StepPlan(step_id=next(step_ids)))
        executor.receive()
    engine.publish()
    reports = executor.rank_reports()
    assert [report.info.process_id for report in reports] == process_ids(engine)
    for report in reports:
        assert 0 < report.usage.forward_s < report.usage.busy_s
        assert report.info.memory.kv_bytes > 0
    page = engine.metrics.text().decode()
    for report in reports:
        assert f'pid="{report.info.process_id}"' in page
    assert 'host="127.' not in page
    assert 'tensor_parallel_size="2"' in page


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


def test_a_plan_that_fails_in_the_middle(engine: Engine) -> None:
    executor = engine.executor
    engine.add(make_request("r", PROMPT))
    plan = engine.scheduler.schedule()
    assert plan is not None
    plan.logits_from, plan.sample = [plan.start[0] + plan.count[0]], [1]  # a token of no logits
    executor.submit(plan)
    with pytest.raises(RankLost, match=r"Rank [01] of 2"):
        executor.receive()
    with pytest.raises(RankLost, match="not running"):
        executor.submit(StepPlan(step_id=3_000))
