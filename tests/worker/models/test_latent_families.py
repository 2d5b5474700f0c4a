"""Families with MLA beyond `FamilyTests`: preemption and tiers of latent blocks, chunks of every size, layouts of checkpoints."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.matrices import some_daily
from tests.worker.models.family_tests import Family
from tests.worker.models.test_moe_families import CASES, draw_corrections


@pytest.fixture(
    scope="module", params=some_daily(["deepseek_v2", "deepseek_v3", "deepseek_v32"], daily=["deepseek_v32"])
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("latent")
    make_checkpoint(folder, case.family, **case.config)
    draw_corrections(folder)
    return Family.of(folder, case)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_back_from_host_and_disk(family: Family, tmp_path: Path, mode: str) -> None:
    """Four times the longest request do not fit at once; then hits come from the tiers, in the end from files alone."""
    bytes_each = family.engine().info.plan.request_bytes
    tiers = {"swap_space": "1MiB", "disk_cache": str(tmp_path), "disk_space": "64MiB", "preemption_mode": mode}
    settings = {"kv_cache_memory_bytes": bytes_each * 5 // 4, "max_num_batched_tokens": 45, "device": "cpu"}
    engine = family.engine(**settings, **tiers)
    for name in ("cold", "hit"):
        family.ask(engine, name, [3, 3, 2, 3, 3, 1])
    work = engine.scheduler.work
    assert (work.num_swaps if mode == "swap" else work.num_preemptions - work.num_swaps) > 0
    engine.shutdown()
    again = family.engine(**settings, **tiers)
    (whole,) = family.ask(again, "from files", [3])
    assert whole.num_cached_tokens > 0
    again.shutdown()


def test_stacked_experts_and_layers_that_predict_further_tokens(
    family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints may hold all experts of a layer in two tensors, and layers for multi-token prediction after the last one."""
    tensors = load_file(family.folder / "model.safetensors")
    for prefix in sorted({name.split("0.gate_proj")[0] for name in tensors if "experts.0.gate_proj" in name}):
        names = ["gate_proj", "up_proj", "down_proj"]
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{name}.weight") for expert in range(8)]) for name in names
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((family.folder / name).read_bytes())
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
    stacked = replace(family, folder=tmp_path)
    with caplog.at_level(logging.WARNING, "transom.worker"):
        stacked.ask(stacked.engine(), "stacked", [2])
    assert "not used" not in caplog.text
