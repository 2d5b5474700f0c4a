"""kill -9 and SIGSTOP of each rank, in prefill and in decode.

Every request gets its error at once, and requests are served again after the restart.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_driver import drain, make_engine, make_request, run
from tests.tiny_checkpoints import reference_greedy
from tests.worker.ranks.rank_watch import left_behind, process_ids, wait_until_gone
from transom_core.contract import Request
from transom_core.errors import RankLost, WorkerLost
from transom_worker.engine.engine import Engine
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
    timeout_s = STEP_TIMEOUTS_S[how]
    engine = make_engine(
        str(tiny_model), device="cpu", tensor_parallel_size=2, steps_in_flight=2, step_timeout_s=timeout_s
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
    for event in events:
        assert event.error is not None
        assert event.error.kind == "WorkerLost"
        assert re.search(SEEN[how].format(rank), event.error.message), event.error.message
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
    assert event.error is not None
    assert event.error.loss_cause == "killed"
    assert not engine.is_restarting
