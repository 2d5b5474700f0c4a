from __future__ import annotations

from statistics import median

import pytest

from transom_worker.simulate.arrivals import Arrivals
from transom_worker.simulate.conversations import build_workload
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload


def reused_share(request: SimulatedRequest, before: tuple[Run, ...]) -> float:
    """The share of the prompt that begins as `before` does."""
    num_tokens, same = 0, True
    for run, other in zip(request.prompt, before, strict=False):
        if not same or run.first_token != other.first_token:
            break
        num_tokens += min(run.num_tokens, other.num_tokens)
        same = run == other
    return num_tokens / request.num_prompt_tokens


@pytest.mark.parametrize("seed", range(3))
def test_the_turns_are_those_that_operators_of_agents_report(seed: int) -> None:
    requests = build_workload("agents", seed=seed).requests
    assert median(request.num_prompt_tokens for request in requests) == pytest.approx(195_000, rel=0.04)
    assert median(request.answer.num_tokens for request in requests) == 317
    reused = []
    for request in requests:
        last = requests[request.after] if request.after is not None else None
        reused.append(reused_share(request, (*last.prompt, last.answer) if last else request.prompt[:1]))
    assert sum(share >= 0.9 for share in reused) / len(reused) == pytest.approx(0.96, abs=0.01)
    pauses = sorted(request.pause_s for request in requests if request.after is not None)
    assert median(pauses) == pytest.approx(2.0, rel=0.1)
    assert pauses[len(pauses) * 99 // 100] == pytest.approx(660.0, rel=0.2)


def test_sessions_of_one_agent_share_its_tools_and_nothing_else() -> None:
    first = [request for request in build_workload("agents").requests if request.after is None]
    assert len(first) == 16
    assert len({request.prompt[0] for request in first}) == 3
    assert len({request.prompt[1] for request in first}) == 16
    assert all(request.turn_boundaries == (request.prompt[0].num_tokens,) for request in first)


def test_a_pause_begins_with_the_answer_before_it() -> None:
    space = TokenSpace()
    first = SimulatedRequest(prompt=(space.take(16),), answer=space.take(1), arrival_s=1.0)
    second = SimulatedRequest(prompt=(space.take(16),), answer=space.take(1), after=0, pause_s=2.5)
    arrivals = Arrivals(Workload(name="two", requests=(first, second)))
    assert list(arrivals.due(1.0)) == [0]
    assert arrivals.next_s() is None
    arrivals.answered(0, 10.0)
    assert arrivals.next_s() == 12.5
    assert not list(arrivals.due(12.4))
    assert list(arrivals.due(12.5)) == [1]
