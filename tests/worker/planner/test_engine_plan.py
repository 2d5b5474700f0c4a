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


def planned_by_command(model: Path, *flags: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", str(model), "--memory", "8MiB", *flags, "--json"])
    assert result.exit_code == 0, result.output
    planned: dict[str, Any] = json.loads(result.stdout)
    return planned


@pytest.mark.parametrize(("steps_in_flight", "hybrid"), [(1, True), (2, False), (2, True)])
def test_engine_and_command_agree_on_every_integer(model: Path, steps_in_flight: int, hybrid: bool) -> None:
    """Without `hybrid` every layer is kept at full length."""
    flags = ["--max-model-len", "1500", "--steps-in-flight", str(steps_in_flight)]
    planned = planned_by_command(model, *flags, *["--no-hybrid-kv-cache"] * (not hybrid))
    settings = Settings.parse(
        model=str(model),
        device="cpu",
        kv_cache_memory_bytes="8MiB",
        max_model_len=1500,
        steps_in_flight=steps_in_flight,
        hybrid_kv_cache=hybrid,
        num_threads=1,
    )
    engine = build_engine(settings.engine_config())
    try:
        plan = engine.info.plan
        assert {"model": str(model), "kv_policy": None, **plan.as_json()} == planned
        assert [group.num_layers for group in plan.groups] == ([1, 3] if "hybrid" in str(model) and hybrid else [4])
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
    planned = planned_by_command(model, "--tensor-parallel-size", "2")
    engine, ranks = make_sharded_engine(str(model), 2, device="cpu")
    try:
        assert {"model": str(model), "kv_policy": None, **engine.info.plan.as_json()} == planned
        assert [rank["heads"][0]["kv_heads"] for rank in planned["ranks"]] == [[0, 1], [1, 2]]
        assert [runner.info.layout.groups[0].block_bytes for runner in ranks.runners] == [
            planned["groups"][0]["block_bytes"]
        ] * 2
    finally:
        engine.shutdown()
