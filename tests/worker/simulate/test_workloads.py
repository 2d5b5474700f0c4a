"""Synthetic workloads have the published figures; a recorded trace is read line by line, and a wrong line is named."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from transom_core.errors import ConfigError
from transom_worker.simulate.conversations import BUILDERS, build_workload
from transom_worker.simulate.replay import Arrivals
from transom_worker.simulate.trace import read_trace
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


GOOD: dict[str, object] = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [10**18, 7]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_equal_ids_are_equal_tokens_and_no_two_answers_are_equal(tmp_path: Path) -> None:
    longer = GOOD | {"input_length": 1024, "timestamp": 2000}
    first, second = read_trace(write(tmp_path / "t.jsonl", GOOD, "", longer)).requests
    prompts = first.prompt_token_ids(), second.prompt_token_ids()
    assert len(prompts[0]) == 700 == first.num_prompt_tokens
    assert prompts[1][:700] == prompts[0]
    assert len(set(prompts[1])) == 1024
    answers = [set(range(a.first_token, a.first_token + a.num_tokens)) for a in (first.answer, second.answer)]
    assert len(answers[0] | answers[1]) == 6
    assert not (answers[0] | answers[1]) & set(prompts[1])
    assert (first.arrival_s, second.arrival_s) == (1.5, 2.0)


def test_requests_come_in_the_order_of_the_file_and_up_to_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD | {"timestamp": 3}, "never read")
    workload = read_trace(path, limit=2)
    assert [request.arrival_s for request in workload.requests] == [1.5, 0.003]
    assert list(Arrivals(workload).due(2.0)) == [1, 0]  # by the clock whatever the order


def test_the_first_requests_may_be_left_out(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path / "t.jsonl", *(GOOD | {"timestamp": 1000 * at} for at in range(5))))
    assert [request.arrival_s for request in workload.part(1, 3).requests] == [1, 2, 3]
    assert [request.arrival_s for request in workload.part(3, None).requests] == [3, 4]
    with pytest.raises(ConfigError, match="--skip 5 leaves no request of t; give at most 4"):
        workload.part(5, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: is not JSON"),
        ("[" * 100_000, r"line 2: is not JSON"),
        ("[1]", r"line 2: holds '\[1\]'; give an object with timestamp, input_length"),
        ({key: value for key, value in GOOD.items() if key != "hash_ids"}, r"line 2: has no hash_ids"),
        (GOOD | {"timestamp": -1}, r"line 2: timestamp is -1; give a number of at least 0"),
        (GOOD | {"timestamp": "now"}, r"line 2: timestamp is 'now'"),
        (GOOD | {"input_length": 0}, r"line 2: input_length is 0; give a whole number of at least 1"),
        (GOOD | {"output_length": 2.5}, r"line 2: output_length is 2.5"),
        (GOOD | {"output_length": True}, r"line 2: output_length is True"),
        (GOOD | {"output_length": 2**32}, r"line 2: output_length is 4294967296, which makes"),
        (GOOD | {"hash_ids": "7"}, r"line 2: hash_ids is 7; give a list"),
        (GOOD | {"hash_ids": [1, None]}, r"line 2: hash_ids is \[1, None\]; give a list of whole numbers"),
        (GOOD | {"hash_ids": [1]}, r"line 2: hash_ids has 1 ids; an input_length of 700 tokens takes 2"),
        (GOOD | {"input_length": 10**12}, r"line 2: hash_ids has 2 ids; an input_length of 1000000000000"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path / "t.jsonl", GOOD, line))


def test_files_without_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(tmp_path / "empty.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "bytes.jsonl")
