from __future__ import annotations

from itertools import pairwise

import pytest

from transom_core.errors import ConfigError
from transom_worker.simulate.conversations import BUILDERS, build_workload


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
