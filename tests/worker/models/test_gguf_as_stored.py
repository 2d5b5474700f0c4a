"""Models whose weights stay as a GGUF file stores them, against the same file dequantised to float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.tiny_checkpoints import load_reference, tiny_llama
from tests.worker.models.tiny_runner import TinyRunner
from tests.worker.models.weights.test_gguf_file import write_gguf
from transom_core.config import ModelConfig
from transom_core.errors import ConfigError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.resolve import resolve_model
from transom_worker.execution.setup.model_loading import load_model
from transom_worker.models.registry import build_model
from transom_worker.models.weights import load_weights

PROMPTS = {"long": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "short": [2, 7]}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_stored_model_is_the_dequantised_one(tmp_path: Path, kind: Kind, tie: bool) -> None:
    path = write_gguf(tmp_path / "model.gguf", load_reference(tiny_llama(tmp_path, layers=2, tie=tie)), kind)
    files = resolve_model(str(path))
    architecture = read_architecture(files.config)
    logits, sizes = [], []
    for quantization in ("none", "gguf"):
        model = build_model(
            architecture, load_weights(files), dtype=torch.float32, device="cpu", quantization=quantization
        )
        steps = TinyRunner(model, architecture, torch.float32).step(PROMPTS, all_rows=True)
        logits.append(torch.cat(list(steps.values())))
        sizes.append(model.weight_bytes)
    assert (logits[1] - logits[0]).norm() / logits[0].norm() < 3e-4
    assert sizes[1] < (0.9 if tie else 0.6) * sizes[0]  # a tied embedding keeps its table


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GGUF file"):
        load_model(ModelConfig(model=str(tiny_llama(tmp_path)), device="cpu", quantization="gguf"))
