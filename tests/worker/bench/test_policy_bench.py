"""`transom bench policies` on a tiny model: every figure is there, makes sense, and becomes a table. The offline
benchmark measures whole batches, and leaves the engine idle."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoints import make_checkpoint
from tests.engine_driver import make_engine
from tests.tiny_checkpoints import tiny_tokenizer
from transom_cluster.cli import app
from transom_core.contract import WindowPolicy
from transom_core.errors import RequestError
from transom_core.settings.settings import Settings
from transom_worker.bench.offline import run_offline
from transom_worker.bench.policies.policy_runs import make_request, run_together
from transom_worker.bench.policies.results import PolicyFigures, tables
from transom_worker.bench.policies.scenarios import Load, memory_and_throughput, quality_by_window, recall, stream
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=1024, vocab_size=len(tiny_tokenizer())
    )


@pytest.mark.exhaustive
def test_figures_and_tables(folder: Path) -> None:
    engine = build_engine(Settings.parse(model=str(folder), dtype="float32", device="cpu").engine_config())
    try:
        figures = PolicyFigures(model="tiny", setup={"trained_len": 1024})
        load = Load(num_requests=2, prompt_tokens=96, output_tokens=3)
        figures.roomy = figures.tight = memory_and_throughput(engine, load, 32)
        figures.quality = quality_by_window(engine, num_tokens=80, judged_from=40)
        figures.recall = recall(engine, num_filler=64, budgets=(64,))
        figures.stream = stream(engine, trained_len=1024, times=2, window=64, num_parts=2)
    finally:
        engine.shutdown()
    full, window = figures.roomy.values()
    assert full.num_output_tokens == window.num_output_tokens == 6
    assert window.peak_kv_bytes < full.peak_kv_bytes
    by_name = {row.name: row for row in figures.quality}
    assert by_name["full"].agreement == 1.0
    assert by_name["full"].kl == 0.0
    assert by_name["window 128"].agreement == 1.0  # the whole text
    assert by_name["window 128"].kl < 1e-4 < by_name["window without sinks 8"].kl
    assert {row.task for row in figures.recall} == {"needle", "brackets", "repetition"}
    assert [row.end for row in figures.stream] == [1008, 2016] * 2  # beyond the trained length
    assert max(row.peak_kv_bytes for row in figures.stream) < 2 * min(row.peak_kv_bytes for row in figures.stream)
    assert tables(figures).count("###") == 5
    json.dumps(figures.as_json())


def test_a_request_that_is_refused_is_an_error(engine: Engine) -> None:
    with pytest.raises(RequestError, match="model's length"):
        run_together(engine, [make_request(range(5), WindowPolicy(window=1024), max_tokens=2)])


def test_the_command_writes_tables_and_figures(folder: Path, tmp_path: Path) -> None:
    sizes = ["--requests", "2", "--prompt-tokens", "96", "--output-tokens", "2", "--window", "32"]
    found = CliRunner().invoke(
        app,
        ["bench", "policies", str(folder), "--output", str(tmp_path), "--only", "memory", "--device", "cpu", *sizes],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert list(json.loads((tmp_path / "policies.json").read_text())["tight"]) == ["full", "window 32"]
    assert "peak KV" in (tmp_path / "policies.md").read_text()


def test_an_unknown_scenario_is_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "policies", "--only", "memory,speed"])
    assert found.exit_code == 2
    assert "speed is none of memory" in " ".join(found.output.split()).replace("│ ", "")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), max_num_batched_tokens=16, max_model_len=256)
    yield engine
    engine.shutdown()


def test_every_decode_step_has_the_whole_batch(engine: Engine) -> None:
    """Even where prompts take many steps, so that the first answers are long when the last one begins."""
    figures = run_offline(engine, batches=(1, 6), prompt_tokens=50, output_tokens=4, repeats=2)
    assert figures.prefill_tokens_per_s > 0
    assert [figure.batch for figure in figures.decode] == [1, 6]
    for figure in figures.decode:
        assert figure.tokens_per_s * figure.step_ms / 1e3 == pytest.approx(figure.batch)
        assert 0 < figure.outside_forward_ms < figure.step_ms
    assert not engine.has_work
    assert sum(group.active_blocks for group in engine.scheduler.stats().groups) == 0


def test_prompts_longer_than_the_engines_length_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"200 prompt and 100 output tokens .* length is 256"):
        run_offline(engine, batches=(1,), prompt_tokens=200, output_tokens=100, repeats=1)
