"""Replays on a small geometry: every prompt token has one outcome, every request ends; and the command that prints their report."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoints import SIZES
from transom_cluster.cli import app
from transom_core.config import SchedulerConfig
from transom_core.errors import ConfigError, ModelError
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.simulate.replay import Replay, StepCost, VirtualClock
from transom_worker.simulate.simulation import ARRIVALS, Simulation, SimulationConfig, read_plan
from transom_worker.simulate.workload import SimulatedRequest, TokenSpace, Workload


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
    [("system-prompt", 0.6333), ("shared-prefixes", 0.6), ("edited-message", 0.704), ("long-answers", 0.9644)],
)
def test_with_memory_everything_shared_is_hit(model: Path, workload: str, infinite: float) -> None:
    config = SimulationConfig(model=model, memory="64MiB", workload=workload)
    report = Simulation(config).run().as_json()
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
    prompts = [request.num_prompt_tokens for request in Simulation(config).workload.requests]
    assert report.prompt_tokens == sum(prompts)
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
    sizes = (100, 20_000, 6_000, 50)
    requests = [SimulatedRequest(prompt=(space.take(size),), answer=space.take(2)) for size in sizes]
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
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "max_position_embeddings": 20_000,
    "rms_norm_eps": 1e-5,
}


def write_model(folder: Path, **changes: object) -> Path:
    """A folder with nothing but that config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


LINE = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
RUNNER = CliRunner()


def arguments(tmp_path: Path, *lines: object) -> list[str]:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = write_model(tmp_path / "tiny")
    return ["bench", "simulate", "--trace", str(trace), "--model", str(model), "--memory", "16MiB"]


def test_json_is_one_object_with_every_count(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE), "--arrivals", "sequential", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["requests"] == 2
    assert report["prompt_tokens"] == 1200
    assert report["hit_tokens"] == 592
    assert report["hit_share"] == 592 / 1200
    assert report["repaired_tokens"] == 0
    assert report["missed_tokens"] == {"below_alignment": 16, "never_seen": 592}
    assert report["output_tokens"] == 8
    assert report["preemptions"] == 0
    assert report["fragmentation"] >= 0
    assert report["seconds"] > 0


def test_brackets_in_names_are_no_markup(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny[red]")
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE), "--model", str(model)])
    assert result.exit_code == 0, result.output
    assert "tiny[red]" in result.stdout


def test_the_report_for_people_names_set_up_and_outcomes(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, arguments(tmp_path, LINE, LINE))
    assert result.exit_code == 0, result.output
    for words in ("trace", "tiny", "49.3%", "missed, never seen", "2 requests", "8 ms a step"):
        assert words in result.stdout


def test_wrong_lines_and_settings_exit_with_2_and_one_sentence(tmp_path: Path) -> None:
    wrong = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE | {"hash_ids": []}), "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "line 2: hash_ids has 0 ids" in wrong.stderr
    host = RUNNER.invoke(app, [*arguments(tmp_path, LINE), "--host-memory", "8 GB?"])
    assert host.exit_code == 2
    assert "--host-memory" in host.stderr
