"""Checkpoints whose tensors are not what the config says: the error names tensor and file, whichever tensor it is. And checkpoints
that hold more than a text decoder, or tensors that the config does not mention.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.quantised_checkpoints import to_format, to_mxfp4
from tests.worker.models.test_deepseek_v4 import PUBLISHED, publish
from tests.worker.models.test_dense_families import BIASES, MLA
from tests.worker.models.test_moe_families import EXPERTS, INDEXED, KIMI, LLAMA4
from transom_core.config import ModelConfig
from transom_core.errors import ModelError
from transom_core.model_files.resolve import eos_token_ids, resolve_model
from transom_worker.execution.setup.model_loading import load_model

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "cohere2": {"sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "lfm2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
        **{"layer_types": ["conv", "full_attention"], "conv_bias": True},
    },
    "nemotron_h": {
        **{
            "hybrid_override_pattern": "ME*-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "mlp_bias": True,
        },
        **{"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48},
        "moe_latent_size": 40,
    },
    "falcon_h1": {
        **BIASES,
        **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_rms_norm": True},
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v3": MLA | EXPERTS | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "glm_moe_dsa": INDEXED | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "kimi_linear": KIMI | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
    "llama4_text": LLAMA4 | {"attention_chunk_size": 16, "interleave_moe_layer_step": 2},
}


NAMES = [*FAMILIES, "llama in gptq order", "gpt_oss in MXFP4", "deepseek_v4", "deepseek_v4 as published"]
DAILY = [
    "deepseek_v3",
    "llama",
    "llama in gptq order",
    "qwen3_moe",
    "llama4_text",
    "gpt_oss in MXFP4",
    "deepseek_v4 as published",
]


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
    make_checkpoint(tmp_path, "llama4_text", **FAMILIES["llama4_text"])
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


@pytest.mark.parametrize(
    ("family", "bias"),
    [("llama", "model.layers.1.self_attn.q_norm.bias"), ("nemotron_h", "backbone.layers.3.mixer.gate_proj.bias")],
)
def test_tensors_that_no_layer_reads_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, bias: str
) -> None:
    make_checkpoint(tmp_path, family, **FAMILIES[family])
    frequencies = f"{bias.rpartition('.')[0]}.rotary_emb.inv_freq"
    rewrite(tmp_path, str, {bias: torch.ones(64), frequencies: torch.ones(8)})
    with caplog.at_level(logging.WARNING, "transom.worker"):
        continuation(tmp_path)
    assert f"1 tensors of its layers are not used, such as {bias}" in caplog.text
