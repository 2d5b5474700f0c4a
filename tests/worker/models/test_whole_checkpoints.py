"""Checkpoints that hold more than a text decoder, or tensors that the config does not mention."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from transom_core.model_files.resolve import eos_token_ids, resolve_model

LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
}


def rewrite(folder: Path, rename: Callable[[str], str], more: dict[str, torch.Tensor]) -> None:
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})


def continuation(folder: Path) -> list[int]:
    engine = make_engine(str(folder), max_model_len=128, dtype="float32")
    (whole,) = run(engine, [make_request("one", prompt(40), max_tokens=12)])
    return whole.token_ids


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
    ],
    ids=["published", "as transformers saves"],
)
def test_a_model_that_also_sees_runs_as_its_text_decoder(
    tmp_path: Path, rename: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "llama4_text", **LLAMA4)
    alone = continuation(tmp_path)
    rewrite(tmp_path, rename, {"vision_model.layers.0.weight": torch.zeros(4)})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": config}))
    with caplog.at_level(logging.WARNING, "transom.worker"):
        assert continuation(tmp_path) == alone
    assert "not used" not in caplog.text


def test_the_text_decoders_config_gives_the_end_token_if_no_other_file_does(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for config, ids in (({}, (7, 8)), ({"eos_token_id": 9}, (9,))):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": [7, 8]}}))
        assert eos_token_ids(resolve_model(str(tmp_path))) == ids


def test_tensors_that_no_layer_reads_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama")
    bias, frequencies = "model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, str, {bias: torch.ones(64), frequencies: torch.ones(8)})
    with caplog.at_level(logging.WARNING, "transom.worker"):
        continuation(tmp_path)
    assert f"1 tensors of its layers are not used, such as {bias}" in caplog.text
