"""A running engine has the planner's integers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.thread_ranks import make_sharded_engine
from transom_cluster.cli import app
from transom_core.settings.settings import Settings
from transom_worker import LLM
from transom_worker.engine.startup import build_engine

LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]


@pytest.fixture(scope="module", params=["full", "hybrid"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, as it is and with windows in its config."""
    if request.param == "full":
        return tiny_model
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": LAYER_TYPES, "sliding_window": 40}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_engine_and_command_agree_on_every_integer(model: Path, steps_in_flight: int) -> None:
    flags = ["--memory", "8MiB", "--max-model-len", "1500", "--steps-in-flight", str(steps_in_flight), "--json"]
    result = CliRunner().invoke(app, ["plan", str(model), *flags])
    assert result.exit_code == 0, result.output
    planned: dict[str, Any] = json.loads(result.stdout)
    settings = Settings.parse(
        model=str(model),
        device="cpu",
        kv_cache_memory_bytes="8MiB",
        max_model_len=1500,
        steps_in_flight=steps_in_flight,
        num_threads=1,
    )
    engine = build_engine(settings.engine_config())
    try:
        plan = engine.info.plan
        assert {"model": str(model), "kv_policy": None, **plan.as_json()} == planned
        assert len(plan.groups) == (2 if "hybrid" in str(model) else 1)
        assert [group.num_layers for group in plan.groups] in ([4], [1, 3])
        stats = engine.scheduler.stats()
        assert (stats.num_pages, stats.page_bytes) == (planned["num_pages"], planned["page_bytes"])
        longest = planned["concurrency"][-1]
        assert (
            f"at once run {planned['concurrency'][0]['requests']} of 1,024, {longest['requests']} of 1,500"
            in engine.report
        )
        assert f"takes {planned['request_bytes']:,} bytes" in engine.report
    finally:
        engine.shutdown()


def test_several_ranks_and_command_agree_too(model: Path) -> None:
    flags = ["--memory", "8MiB", "--tensor-parallel-size", "2", "--json"]
    planned = json.loads(CliRunner().invoke(app, ["plan", str(model), *flags]).stdout)
    engine, ranks = make_sharded_engine(str(model), 2, device="cpu")
    try:
        assert {"model": str(model), "kv_policy": None, **engine.info.plan.as_json()} == planned
        assert [rank["heads"][0]["kv_heads"] for rank in planned["ranks"]] == [[0, 1], [1, 2]]
        assert [runner.info.layout.groups[0].block_bytes for runner in ranks.runners] == [
            planned["groups"][0]["block_bytes"]
        ] * 2
    finally:
        engine.shutdown()


def test_llm_without_hybrid_keeps_every_layer_at_full_length(model: Path) -> None:
    options: dict[str, Any] = {"kv_cache_memory_bytes": "4MiB", "num_threads": 1, "hybrid_kv_cache": False}
    with LLM(str(model), device="cpu", **options) as llm:
        plan = llm.engine.info.plan
    result = CliRunner().invoke(app, ["plan", str(model), "--memory", "4MiB", "--no-hybrid-kv-cache", "--json"])
    assert {"model": str(model), "kv_policy": None, **plan.as_json()} == json.loads(result.stdout)
    assert [(group.name, group.num_layers) for group in plan.groups] == [("full", 4)]
