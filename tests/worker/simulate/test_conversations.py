"""Synthetic workloads have the published figures."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from transom_core.errors import ConfigError
from transom_worker.simulate.conversations import BUILDERS, build_workload
from transom_worker.simulate.replay import Arrivals
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload


def test_sessions_are_those_of_the_published_figures() -> None:
    requests = build_workload("sessions").requests
    assert len(requests) == 128
    assert sum(request.num_prompt_tokens for request in requests) == 960_000
    assert {request.answer.num_tokens for request in requests} == {400}
    last = requests[-1]
    assert last.num_prompt_tokens == 11_000
    assert last.after == len(requests) - 1 - 16
    assert last.turn_boundaries[:3] == (4_000, 4_400, 5_000)
    assert last.turn_boundaries[-1] == 10_400


@pytest.mark.parametrize("name", ["sessions", "shuffled", "poisson"])
def test_each_turn_repeats_the_one_before_and_its_answer(name: str) -> None:
    requests = build_workload(name).requests
    assert sum(request.after is None for request in requests) == 16
    for at, request in enumerate(requests):
        if request.after is None:
            continue
        assert request.after < at
        before = requests[request.after]
        assert request.prompt[:-1] == (*before.prompt, before.answer)


def test_a_seed_draws_the_order() -> None:
    assert build_workload("shuffled", seed=1) == build_workload("shuffled", seed=1)
    assert build_workload("shuffled", seed=1) != build_workload("shuffled", seed=2)
    arrivals = [request.arrival_s for request in build_workload("poisson").requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] > 100


def test_contents_are_shared_by_token_id_alone() -> None:
    for name in BUILDERS:
        requests = build_workload(name).requests
        runs = {run.first_token: run for request in requests for run in (*request.prompt, request.answer)}
        spans = sorted((run.first_token, run.num_tokens) for run in runs.values())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no workload 'chat'; take one of sessions, shuffled"):
        build_workload("chat")


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
