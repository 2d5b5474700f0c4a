"""Checkpoints whose tensors are not what the config says: the error names tensor and file, whichever tensor it is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.quantised_checkpoints import to_format, to_mxfp4
from tests.worker.models.test_deepseek_v4_checkpoints import PUBLISHED, publish
from transom_core.config import ModelConfig
from transom_core.errors import ModelError
from transom_worker.execution.setup.model_loading import load_model

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "cohere2": {"sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 80,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
    },
}


NAMES = [*FAMILIES, "llama in gptq order", "gpt_oss in MXFP4", "deepseek_v4", "deepseek_v4 as published"]
DAILY = ["llama", "llama in gptq order", "qwen3_moe", "llama4_text", "gpt_oss in MXFP4", "deepseek_v4 as published"]


@pytest.fixture(scope="module", params=some_daily(NAMES, daily=DAILY))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("family")
    family = request.param.split()[0]
    if family == "deepseek_v4":
        make_deepseek_v4(path / "plain", **PUBLISHED)
        return path / "plain" if family == request.param else publish(path / "plain", path / "published")
    make_checkpoint(path / "plain", family, num_hidden_layers=2, **FAMILIES[family])
    if family == request.param:
        return path / "plain"
    if request.param.endswith("MXFP4"):
        to_mxfp4(path / "plain", path / "packed")
    else:
        to_format(path / "plain", path / "packed", request.param.removeprefix(f"{family} in "))
    return path / "packed"


def load(folder: Path) -> None:
    load_model(ModelConfig(model=str(folder), device="cpu"))


def names(tensors: Tensors) -> list[str]:
    """Tensors of every kind: those of experts above the second are like its own, and DeepSeek's fourth layer has the attention of
    its second one and the experts of its third."""
    return [name for name in tensors if not re.search(r"\.experts\.[2-9]\.|layers\.3\.", name)]


def test_a_missing_tensor(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / FILE)
    for name in names(tensors):
        change(tensors, tmp_path, name, None)
        with pytest.raises(ModelError, match=rf"no tensor '{name}' in model\.safetensors"):
            load(tmp_path)


def test_a_tensor_of_another_shape(folder: Path, tmp_path: Path) -> None:
    """Each tensor in one of these ways: a row too many, one too few, turned round, an axis more, no axis at all."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / FILE)
    for index, name in enumerate(names(tensors)):
        tensor = tensors[name]
        turned = tensor.transpose(-1, -2) if tensor.dim() > 1 and tensor.shape[-1] != tensor.shape[-2] else tensor[None]
        wrong = (torch.cat([tensor, tensor[:1]]), tensor[:-1], turned, tensor[None], tensor.flatten()[0])
        change(tensors, tmp_path, name, wrong[index % len(wrong)])
        with pytest.raises(ModelError, match=rf"model\.safetensors: tensor '{name}' has shape"):
            load(tmp_path)


def change(tensors: Tensors, target: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Write the checkpoint's file into `target` with one tensor replaced, or missing."""
    changed = {other: kept for other, kept in tensors.items() if other != name}
    if tensor is not None:
        changed[name] = tensor.contiguous()
    save_file(changed, target / FILE, metadata={"format": "pt"})
