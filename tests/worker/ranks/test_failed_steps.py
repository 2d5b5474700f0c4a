"""Steps that fail on ranks, which all tests share: if every rank refuses a plan, the ranks go on; if some do, all are lost. If
memory was short, the request that asked for the most ends, and no other.

kill -9 and SIGSTOP of each rank, in prefill and in decode: every request gets its error at once, and requests are served again
after the restart.
"""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.engine_driver import drain, make_engine, make_request, run
from tests.present import present
from tests.tiny_checkpoints import reference_greedy
from tests.worker.ranks.rank_watch import left_behind, process_ids, wait_until_gone
from transom_core.contract import Request
from transom_core.errors import RankLost, WorkerLost
from transom_worker.engine.engine import Engine
from transom_worker.execution.ranks import ranks_executor as executor
from transom_worker.execution.ranks.channel import ExecutorChannel
from transom_worker.execution.ranks.messages import RunStep, decode, encode
from transom_worker.scheduling.step import StepPlan

NUM_TOKENS = 12
PROMPTS = [[(31 * i + 17 * j) % 1900 + 40 for j in range(length)] for i, length in enumerate((40, 130, 7))]
STEP_TIMEOUTS_S = {  # a rank that only waits for a core is not to be taken for one that hangs
    signal.SIGKILL: 600.0,
    signal.SIGSTOP: 6.0,
}
SEEN = {  # a kill is noticed, not waited for; of a rank that hangs the others say which it is
    signal.SIGKILL: r"Rank {} .*(was killed by SIGKILL|died)",
    signal.SIGSTOP: r"Rank {} .*was not ready within",
}
SHORT, LONG = list(range(5, 15)), list(range(40, 90))
FAR_TOO_MANY = 2**45  # tokens: no address space holds their positions


@pytest.fixture(
    scope="module",
    params=[signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)],
    ids=["kill", "stop"],
)
def how(request: pytest.FixtureRequest) -> signal.Signals:
    struck: signal.Signals = request.param
    return struck


@pytest.fixture(scope="module")
def engine(tiny_model: Path, how: signal.Signals) -> Iterator[Engine]:
    engine = make_engine(
        str(tiny_model), device="cpu", tensor_parallel_size=2, steps_in_flight=2, step_timeout_s=STEP_TIMEOUTS_S[how]
    )
    assert "rank 1 of 2: query heads 3-5 of 6, KV heads 1 of 2; inner columns 96-191 of 192" in engine.report
    yield engine
    engine.shutdown()
    assert not left_behind(os.getpid())


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return [reference_greedy(tiny_model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def requests(name: str) -> list[Request]:
    return [make_request(f"{name}-{i}", prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]


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


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.parametrize("steps_before", [pytest.param(0, marks=pytest.mark.exhaustive), 4], ids=["prefill", "decode"])
def test_a_lost_rank_costs_a_restart(
    engine: Engine,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
    rank: int,
    steps_before: int,
) -> None:
    name = f"{how.name}-{rank}-{steps_before}"
    pids = process_ids(engine)
    for request in requests(name):
        engine.add(request)
    for _ in range(steps_before):
        engine.step()
    submit = engine.executor.submit

    def submit_and_strike(plan: StepPlan) -> None:
        submit(plan)
        monkeypatch.undo()
        os.kill(pids[rank], how)

    monkeypatch.setattr(engine.executor, "submit", submit_and_strike)
    events = [event for event in engine.step() if event.error is not None]
    while not events:  # the step that was under way may have answered
        events = [event for event in engine.step() if event.error is not None]
    assert {event.request_id for event in events} == {request.request_id for request in requests(name)}
    for error in (present(event.error) for event in events):
        assert error.kind == "WorkerLost"
        assert re.search(SEEN[how].format(rank), error.message), error.message
    assert engine.is_restarting
    wait_until_gone(*pids)
    with pytest.raises(WorkerLost, match="again"):
        engine.add(make_request("early", [5, 6]))
    assert sum(group.active_blocks for group in engine.scheduler.stats().groups) == 0
    engine.step()
    assert not engine.is_restarting
    assert [whole.token_ids for whole in run(engine, requests(f"{name}-again"))] == expected


def test_a_loss_that_a_call_between_two_steps_meets(engine: Engine, how: signal.Signals) -> None:
    """No request runs: a prefix of another worker moves."""
    if how == signal.SIGSTOP:
        pytest.skip("A rank that hangs has not ended.")
    engine.add(make_request("lost", PROMPTS[0]), is_held=True)
    engine.step()
    pids = process_ids(engine)
    os.kill(pids[1], signal.SIGKILL)
    while not engine.executor.lost:
        wait_until_gone(pids[1])
    with pytest.raises(RankLost):
        engine.executor.take_read_ends()
    (event,) = [event for event in drain(engine) if event.error is not None]
    assert present(event.error).loss_cause == "killed"
    assert not engine.is_restarting


def test_a_plan_that_fails_in_the_middle(engine: Engine) -> None:
    executor = engine.executor
    engine.add(make_request("r", PROMPTS[0]))
    plan = present(engine.scheduler.schedule())
    plan.logits_from, plan.sample = [plan.start[0] + plan.count[0]], [1]  # a token of no logits
    executor.submit(plan)
    with pytest.raises(RankLost, match=r"Rank [01] of 2"):
        executor.receive()
    with pytest.raises(RankLost, match="not running"):
        executor.submit(StepPlan(step_id=3_000))
