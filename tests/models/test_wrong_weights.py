"""Checkpoints whose tensors are not what the config says: the error names tensor and file, whichever tensor it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from mxfp4_checkpoint import pack_experts
from safetensors.torch import load_file, save_file

from transom_worker.config import ModelConfig
from transom_worker.errors import ModelError
from transom_worker.execution.model_loading import load_model

FAMILIES = {
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


@pytest.fixture(scope="module", params=[*FAMILIES, "gpt_oss in MXFP4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("family")
    family = request.param.split()[0]
    make_checkpoint(path / "plain", family, num_hidden_layers=2, **FAMILIES[family])
    if family == request.param:
        return path / "plain"
    pack_experts(path / "plain", path / "packed")
    return path / "packed"


def load(folder: Path) -> None:
    load_model(ModelConfig(model=str(folder), device="cpu"))


def names(folder: Path) -> list[str]:
    """Tensors of every kind: those of experts above the first are like its own."""
    listed = load_file(folder / "model.safetensors")
    return [name for name in listed if ".experts." not in name or not any(f".{e}." in name for e in (2, 3))]


def test_a_missing_tensor(folder: Path, tmp_path: Path) -> None:
    for name in names(folder):
        with pytest.raises(ModelError, match=rf"no tensor '{name}' in model\.safetensors"):
            load(changed(folder, tmp_path, name, None))


def test_a_tensor_of_another_shape(folder: Path, tmp_path: Path) -> None:
    """One row too many, one too few, turned round, with an axis more, and no axis at all."""
    for name in names(folder):
        tensor = load_file(folder / "model.safetensors")[name]
        turned = tensor.transpose(-1, -2) if tensor.dim() > 1 and tensor.shape[-1] != tensor.shape[-2] else tensor[None]
        for wrong in (torch.cat([tensor, tensor[:1]]), tensor[:-1], turned, tensor[None], tensor.flatten()[0]):
            with pytest.raises(ModelError, match=rf"model\.safetensors: tensor '{name}' has shape"):
                load(changed(folder, tmp_path, name, wrong))


def changed(folder: Path, target: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """A copy of a checkpoint in which one tensor is replaced, or missing."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    return target
