"""Device, dtype, EOS tokens and threads, from settings and checkpoint."""

from pathlib import Path

import pytest
import torch

from transom_core.config import ModelConfig
from transom_core.model_files.resolve import ModelFiles, eos_token_ids
from transom_kernels.cpu import threads
from transom_worker.execution.setup import model_loading

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def files(config: dict[str, object], generation_config: dict[str, object] | None = None) -> ModelFiles:
    return ModelFiles(name="x", path=Path("x"), is_gguf=False, config=config, generation_config=generation_config or {})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": [3]}, {"eos_token_id": None}, (3,)),
        ({}, {}, ()),
    ],
)
def test_ends_of_text(config: dict[str, object], generation: dict[str, object], expected: tuple[int, ...]) -> None:
    assert eos_token_ids(files(config, generation)) == expected


def test_windows_come_from_settings() -> None:
    config = ModelConfig(model="x", window=8, sinks=2, window_pattern="SF")
    shape = model_loading.model_architecture(files(LLAMA), config)
    assert [(attention.window, attention.sinks) for attention in shape.layers] == [(8, 2), (None, 0), (8, 2)]
    config = ModelConfig(model="x", window=8, chunk=32, window_pattern="CSF")
    shape = model_loading.model_architecture(files(LLAMA), config)
    assert [(attention.window, attention.chunk) for attention in shape.layers] == [(None, 32), (8, None), (None, None)]
    plain = model_loading.model_architecture(files(LLAMA), ModelConfig(model="x"))
    assert all(attention.window is None for attention in plain.layers)


def test_threads_as_set_or_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    asked_for_kernels: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(threads, "set_num_threads", asked_for_kernels.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(threads, "num_usable_cores", lambda: 12)
    model_loading.set_threads(3)
    model_loading.set_threads(None)
    assert asked == asked_for_kernels == [3, 12]
