"""Replays on a small geometry: every prompt token has one outcome, every request ends; and the command that prints their report.

Synthetic workloads have the published figures; a recorded trace is read line by line, and a wrong line is named.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from tests.checkpoints import SIZES
from transom_cluster.cli import app
from transom_core.config import SchedulerConfig
from transom_core.errors import ConfigError, ModelError
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.simulate.conversations import BUILDERS, build_workload
from transom_worker.simulate.replay import Arrivals, Replay, StepCost, VirtualClock
from transom_worker.simulate.simulation import ARRIVALS, Simulation, SimulationConfig, read_plan
from transom_worker.simulate.trace import read_trace
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def replay(
    model: Path, requests: Sequence[SimulatedRequest], *, arrivals: str, memory: str = "64MiB", **scheduling: int
) -> tuple[Replay, Scheduler]:
    plan = read_plan(model, memory=memory, block_size=16)
    workload = Workload(name="test", requests=tuple(requests))
    workload = workload.one_by_one() if arrivals == "sequential" else workload
    clock = VirtualClock()
    config = SchedulerConfig(**scheduling)  # type: ignore[arg-type]
    scheduler = Scheduler(config, KvCache(plan.layout, block_size=16), max_model_len=plan.max_model_len)
    return Replay(scheduler, workload, cost=StepCost(), clock=clock), scheduler


@pytest.mark.parametrize(
    ("workload", "infinite"),
    [
        ("sessions", 0.8619),
        ("system-prompt", 0.6333),
        ("shared-prefixes", 0.6),
        ("edited-message", 0.704),
        ("long-answers", 0.9644),
    ],
)
def test_with_memory_everything_shared_is_hit(model: Path, workload: str, infinite: float) -> None:
    report = Simulation(SimulationConfig(model=model, memory="64MiB", workload=workload)).run().as_json()
    assert report["hit_share"] == pytest.approx(infinite, abs=1e-4)
    assert report["preemptions"] == 0
    assert report["refused"] == {}


@pytest.mark.parametrize(("workload", "memory"), [("shuffled", "0.2x"), ("poisson", "0.6x")])
def test_outcomes_sum_to_the_prompts_under_pressure(model: Path, workload: str, memory: str) -> None:
    config = SimulationConfig(model=model, memory=memory, workload=workload, arrivals="recorded", limit=40)
    report = Simulation(config).run()
    figures = report.as_json()
    assert report.requests == 40
    assert report.output_tokens == 40 * 400
    assert report.hit_tokens + report.repaired_tokens + sum(report.missed_tokens.values()) == report.prompt_tokens
    assert report.prompt_tokens == sum(one.num_prompt_tokens for one in Simulation(config).workload.requests)
    assert json.loads(json.dumps(figures)) == figures
    assert 0 <= report.fragmentation < 0.5


def test_one_at_a_time_leaves_no_overlap_and_recorded_arrivals_do(model: Path) -> None:
    space = TokenSpace()
    requests = [
        SimulatedRequest(prompt=(space.take(100),), answer=space.take(20), arrival_s=at * 0.01) for at in range(6)
    ]
    steps = {}
    for arrivals in ARRIVALS:
        player, _ = replay(model, requests, arrivals=arrivals)
        counts = player.run()
        assert counts.requests == 6
        assert counts.output_tokens == 120
        steps[arrivals] = counts.steps
    assert steps["sequential"] == 120
    assert steps["recorded"] < 60


def test_the_clock_waits_for_late_arrivals_and_turns_wait_for_answers(model: Path) -> None:
    space = TokenSpace()
    first = SimulatedRequest(prompt=(space.take(64),), answer=space.take(50), arrival_s=10.0)
    second = SimulatedRequest(
        prompt=(*first.prompt, first.answer, space.take(10)), answer=space.take(5), arrival_s=10.01, after=0
    )
    player, scheduler = replay(model, [first, second], arrivals="recorded")
    counts = player.run()
    assert counts.virtual_seconds > 10.4
    assert counts.steps == 55  # never both at once
    assert scheduler.stats().outcome_tokens["hit"] == 112  # 113 of prompt and answer were computed
    assert sum(group.active_blocks for group in scheduler.stats().groups) == 0


def test_what_the_model_or_the_pool_cannot_hold_is_refused_and_counted(model: Path) -> None:
    space = TokenSpace()
    requests = [SimulatedRequest(prompt=(space.take(n),), answer=space.take(2)) for n in (100, 20_000, 6_000, 50)]
    player, _ = replay(model, requests, arrivals="sequential", memory="600KiB")
    ended: list[int] = []
    counts = player.run(ended.append)
    assert counts.refused == {"PromptTooLong": 1, "RequestTooLarge": 1}
    assert counts.requests == 2
    assert ended == [1, 2, 3, 4]


def test_a_model_of_windows_alone_has_no_working_set(tmp_path: Path) -> None:
    model = write_model(tmp_path / "sliding", layer_types=["sliding_attention"] * 4)
    assert Simulation(SimulationConfig(model=model, memory="1MiB", workload="sessions", limit=40)).run().hit_tokens
    with pytest.raises(ConfigError, match="every layer of this model slides"):
        Simulation(SimulationConfig(model=model, memory="2x", workload="sessions"))


def test_contradicting_settings_are_refused(model: Path, tmp_path: Path) -> None:
    good = dict(model=model, memory="1MiB", workload="sessions")
    for changes, message in (
        ({"workload": None}, "either --trace FILE or --workload"),
        ({"trace": tmp_path}, "either --trace FILE or --workload"),
        ({"workload": "chat"}, "no workload 'chat'; take one of sessions, shuffled"),
        ({"arrivals": "random"}, "--arrivals is 'random'; take one of sequential, recorded"),
        ({"host_memory": "1KiB"}, "A host tier of 1024 bytes holds 0 pages"),
        ({"trace": tmp_path, "workload": None, "memory": "2x"}, "for a trace give bytes"),
        ({"memory": "manyx"}, "--memory is 'manyx'"),
        ({"memory": "many"}, "memory is 'many'"),
        ({"model": tmp_path / "nothing"}, "config.json"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            Simulation(SimulationConfig(**(good | changes)))  # type: ignore[arg-type]


def test_a_host_tier_adds_its_memory_to_the_devices(model: Path) -> None:
    reports = []
    for host_memory in ("0", "4800KiB"):
        config = SimulationConfig(model=model, memory="0.1x", host_memory=host_memory, workload="sessions", limit=36)
        reports.append(Simulation(config).run())
    small, both = reports
    assert small.host_tokens == 0
    assert 0 < both.host_tokens <= both.hit_tokens
    assert both.hit_tokens > small.hit_tokens
    assert sum(both.missed_tokens.values()) + both.hit_tokens + both.repaired_tokens == both.prompt_tokens


CONFIG = SIZES | {
    **{"model_type": "gpt_oss", "dtype": "bfloat16", "num_key_value_heads": 1, "num_local_experts": 4},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64},
    **{"max_position_embeddings": 20_000, "rms_norm_eps": 1e-5},
}


def write_model(folder: Path, **changes: object) -> Path:
    """A folder with nothing but that config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


LINE = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
RUNNER = CliRunner()


def arguments(tmp_path: Path, *lines: object) -> list[str]:
    trace = write(tmp_path / "trace.jsonl", *lines)
    model = write_model(tmp_path / "tiny")
    return ["bench", "simulate", "--trace", str(trace), "--model", str(model), "--memory", "16MiB"]


def test_json_is_one_object_with_every_count(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE), "--arrivals", "sequential", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    expected: dict[str, object] = {
        **{"requests": 2, "prompt_tokens": 1200, "hit_tokens": 592, "hit_share": 592 / 1200, "repaired_tokens": 0},
        **{"missed_tokens": {"below_alignment": 16, "never_seen": 592}, "output_tokens": 8, "preemptions": 0},
    }
    assert {name: report[name] for name in expected} == expected
    assert report["fragmentation"] >= 0
    assert report["seconds"] > 0


def test_the_report_for_people_names_set_up_and_outcomes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny[red]")  # brackets in names are no markup
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE), "--model", str(model)])
    assert result.exit_code == 0, result.output
    for words in ("trace", "tiny[red]", "49.3%", "missed, never seen", "2 requests", "8 ms a step"):
        assert words in result.stdout


def test_wrong_lines_and_settings_exit_with_2_and_one_sentence(tmp_path: Path) -> None:
    wrong = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE | {"hash_ids": []}), "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "line 2: hash_ids has 0 ids" in wrong.stderr
    host = RUNNER.invoke(app, [*arguments(tmp_path, LINE), "--host-memory", "8 GB?"])
    assert host.exit_code == 2
    assert "--host-memory" in host.stderr


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
    workload = read_trace(write(tmp_path / "t.jsonl", GOOD, GOOD | {"timestamp": 3}, "never read"), limit=2)
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
        (GOOD | {"input_length": 0}, r"line 2: input_length is 0; give a whole number of at least 1"),
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
