"""Text decoders inside larger checkpoints, under the names of either time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from transom_core.errors import ModelError
from transom_core.model_files.resolve import resolve_model
from transom_worker.models.weights import Weights, load_weights

NORM, HEAD = "model.layers.0.input_layernorm.weight", "lm_head.weight"


def open_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> Weights:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama4"}))
    return load_weights(resolve_model(str(folder)))


@pytest.mark.parametrize(
    ("norm", "head"),
    [
        (NORM, HEAD),
        (f"language_model.{NORM}", f"language_model.{HEAD}"),
        (NORM.replace("model.", "model.language_model."), HEAD),
    ],
)
def test_a_decoder_is_found_under_each_name(tmp_path: Path, norm: str, head: str) -> None:
    tensors = {norm: torch.arange(4.0), head: torch.ones(2, 4), "vision_model.patch_embedding.weight": torch.zeros(3)}
    weights = open_weights(tmp_path, tensors)
    assert torch.equal(weights(NORM, shape=(4,), part=(slice(1, 3),)), torch.tensor([1.0, 2.0]))
    assert weights(HEAD).shape == (2, 4)
    with pytest.raises(ModelError, match=r"no tensor '.*layers\.9\.input_layernorm\.weight'"):
        weights("model.layers.9.input_layernorm.weight")
    weights.close()
