"""Checkpoints whose tensors are not what the config says: the error names tensor and file, whichever tensor it is. And checkpoints
that hold more than a text decoder, or tensors that the config does not mention.

Checkpoints with exactly the names of published ones, as index files or readers of these checkpoints have them, load without a
warning and give the text that transformers' names give. And fields of published configs that were refused or misread.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.quantised_checkpoints import to_format, to_fp8, to_mxfp4
from tests.worker.models.test_architecture import SMALL
from tests.worker.models.test_deepseek_v4 import PUBLISHED, publish
from tests.worker.models.test_moe_families import ALL_CASES
from tests.worker.planner.model_configs import CONFIGS
from transom_core.config import ModelConfig
from transom_core.errors import ModelError
from transom_core.model_config.architecture import read_architecture
from transom_worker.execution.setup.model_loading import load_model
from transom_worker.models.weights.quantisation_scheme import read_scheme

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
FAMILIES = (
    *("llama3", "qwen3", "cohere2", "olmo3", "qwen3_moe", "lfm2_moe", "nemotron_h with experts", "jamba", "gpt_oss"),
    "llama4",
    *("falcon_h1 with norms and biases", "step3p5", "deepseek_v3", "glm_moe_dsa", "kimi_linear", "bailing_hybrid"),
)
NAMES = [*FAMILIES, "llama3 in gptq order", "gpt_oss in MXFP4", "deepseek_v4", "deepseek_v4 as published"]
DAILY = ["deepseek_v3", "llama3 in gptq order", "llama4", "gpt_oss in MXFP4", "deepseek_v4 as published"]
PARTS = ("gate_proj", "up_proj", "down_proj")
PLAIN, OLDER, NEWER = "model.", "language_model.model.", "model.language_model."  # prefixes of the text decoder

# Patterns of names: {a,b} are alternatives, N is a number, and what begins with a dot is in a layer of the text decoder.
NORMS = "model.{embed_tokens,norm}.weight .{input,post_attention}_layernorm.weight "
TIED = NORMS + ".self_attn.{q,k,v,o}_proj.weight "
ATTENTION = TIED + "lm_head.weight "
MLP, QK = ".mlp.{gate,up,down}_proj.weight ", ".self_attn.{q,k}_norm.weight "
EXPERT_NAMES = ".mlp.gate.weight .mlp.experts.N.{gate,up,down}_proj.weight "
CORRECTED = ".mlp.gate.e_score_correction_bias "
DELTA = ".linear_attn.{A_log,dt_bias,{in_proj_{a,b,qkv,z},conv1d,norm,out_proj}.weight} "
QWEN3_5 = ".mlp.{gate,shared_expert{.{gate,up,down}_proj,_gate}}.weight .mlp.experts.{gate_up,down}_proj"
FP8 = "{.self_attn.{q,k,v,o},.mlp.experts.N.{gate,up,down}}_proj.weight_scale_inv"
GEMMA_3 = TIED + MLP + QK + ".{pre,post}_feedforward_layernorm.weight "
GEMMA_4 = GEMMA_3 + ".layer_scalar "
ROUTER = ".router.{{per_expert_,}scale,proj.weight} .post_feedforward_layernorm_1.weight "
GEMMA_MOE = GEMMA_4 + ROUTER + ".{pre,post}_feedforward_layernorm_2.weight "
GEMMA_E2B = GEMMA_4 + ".{per_layer_input_gate,per_layer_projection,post_per_layer_input_norm}.weight "
EMBEDDINGS = "model.{embed_tokens_per_layer,per_layer_{model_projection,projection_norm}}.weight"
GPT_OSS = ".self_attn.{{q,k,v,o}_proj.bias,sinks} .mlp.router.{weight,bias} .mlp.experts.{gate_up,down}_proj_{blocks,scales,bias}"
LLAMA_4 = ATTENTION + ".feed_forward.{{,shared_expert.}{gate,up,down}_proj,router}.weight .feed_forward.experts."
MIXTRAL = ".block_sparse_moe.{gate,experts.N.{w1,w2,w3}}.weight "
KIMI_NAMES = (
    ".self_attn.{A_log,dt_bias,{o_norm,kv_a_layernorm,kv_a_proj_with_mqa,{q,k,v}_conv1d}.weight}"
    " .self_attn.{q,k,v,b,o,f_a,f_b,g_a,g_b,kv_b}_proj.weight .block_sparse_moe.shared_experts.{gate,up,down}_proj.weight"
    " .block_sparse_moe.{gate.{weight,e_score_correction_bias},experts.N.{w1,w2,w3}.weight}"
)
LING = (
    "model.{word_embeddings,norm}.weight lm_head.weight .{input,post_attention}_layernorm.weight"
    " .attention.{A_log,dt_bias,{o_norm,kv_a_layernorm,kv_a_proj_with_mqa,{q,k,v}_conv1d,dense}.weight}"
    " .attention.{q,k,v,b,f,g,kv_b}_proj.weight .mlp.shared_experts.{gate,up,down}_proj.weight"
    " .mlp.{gate.{weight,expert_bias},experts.N.{gate,up,down}_proj.weight} "
)
JAMBA = (
    "model.{embed_tokens,final_layernorm}.weight lm_head.weight .{input_layernorm,pre_ff_layernorm,self_attn.{q,k,v,o}_proj}.weight"
    " .mamba.{A_log,D,conv1d.bias,dt_proj.bias,{in_proj,conv1d,x_proj,dt_proj,{dt,b,c}_layernorm,out_proj}.weight}"
    " .feed_forward.{router,{,experts.N.}{gate,up,down}_proj}.weight"
)
LATENT = (
    ".self_attn.{q_a_layernorm,kv_a_layernorm,kv_a_proj_with_mqa,{q_a,q_b,kv_b,o}_proj}.weight .mlp.gate.weight "
    ".mlp.shared_experts.{gate,up,down}_proj.weight .mlp.experts.{gate_up,down}_proj"
)
STEP = (
    ".self_attn.g_proj.weight .moe.{router_bias,{gate,{gate,up,down}_proj}.weight}"
    " .share_expert.{gate,up,down}_proj.weight"
)
SINKS = ".self_attn.attention_sink_bias"
GLM = ".self_attn.{q,k,v}_proj.bias .mlp.shared_experts.{gate,up,down}_proj.weight"

# Beside the text decoder: encoders, and layers for multi-token prediction; and keys of a layer that reads another one's cache.
BESIDE = (
    "{,model.}{vision_tower.encoder,vision_model,visual}.{layers,blocks}.N.mlp.up_proj.weight mtp.norm.weight"
    " multi_modal_projector.linear_1.weight {mtp,model.mtp}.layers.N.{eh_proj.weight,mlp.experts.gate_up_proj}"
)
OWN_BESIDE = {
    "DeepSeek V3 stacked": "model.layers.4.eh_proj.weight",
    "Step 3.5": "model.layers.4.{eh_proj,transformer.shared_head.output,mlp.up_proj}.weight",
    "GLM-4.5": "model.layers.4.{eh_proj,shared_head.norm,mlp.gate}.weight",
    "Gemma 4 E2B": "model.language_model.layers.7.self_attn.{k_proj,v_proj,k_norm}.weight",
}

# Model -> a case of its family, prefix, and names. docs/models.md has the sources.
MODELS = {
    "gpt-oss": ("gpt_oss", PLAIN, ATTENTION + GPT_OSS),
    "Gemma 3": ("gemma3", OLDER, GEMMA_3),
    "Gemma 4 26B": ("gemma4 with experts", NEWER, GEMMA_MOE + ".experts.{gate_up,down}_proj"),
    "Gemma 4 26B split": ("gemma4 with experts", NEWER, GEMMA_MOE + ".experts.N.{gate,up,down}_proj.weight"),
    "Gemma 4 E2B": ("gemma4", NEWER, GEMMA_E2B + EMBEDDINGS),
    "Llama 4": ("llama4", OLDER, LLAMA_4 + "{gate_up,down}_proj"),
    "Llama 4 split": ("llama4", OLDER, LLAMA_4 + "N.{gate,up,down}_proj.weight"),
    "Mistral Small 3.2": ("mistral without windows", OLDER, ATTENTION + MLP),
    "Qwen 3": ("qwen3", PLAIN, ATTENTION + MLP + QK),
    "Qwen 3 MoE in fp8": ("qwen3_moe", PLAIN, ATTENTION + QK + EXPERT_NAMES + FP8),
    "Qwen3.5 MoE": ("qwen3_5_moe", NEWER, ATTENTION + QK + DELTA + QWEN3_5),
    "Phi 3": ("phi3", PLAIN, NORMS + "lm_head.weight {.self_attn.{qkv,o},.mlp.{gate_up,down}}_proj.weight"),
    "Mixtral": ("mixtral", PLAIN, ATTENTION + MIXTRAL),
    "MiniMax M2": ("minimax_m2", PLAIN, ATTENTION + QK + MIXTRAL + ".block_sparse_moe.e_score_correction_bias"),
    "DeepSeek V3 stacked": ("deepseek_v3", PLAIN, NORMS + "lm_head.weight " + MLP + CORRECTED + LATENT),
    "MiMo-V2-Flash": ("mimo_v2_flash", PLAIN, ATTENTION + MLP + EXPERT_NAMES + CORRECTED + SINKS),
    "Step 3.5": ("step3p5", PLAIN, ATTENTION + QK + MLP + STEP),
    "Jamba": ("jamba", PLAIN, JAMBA),
    "Kimi Linear": ("kimi_linear", PLAIN, NORMS + "lm_head.weight " + MLP + KIMI_NAMES),
    "Ling 3": ("bailing_hybrid", PLAIN, LING + MLP),
    "GLM-4.5": ("glm4_moe", PLAIN, ATTENTION + QK + MLP + EXPERT_NAMES + CORRECTED + GLM),
}


@pytest.fixture(scope="module", params=some_daily(NAMES, daily=DAILY))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, (name, _, form) = tmp_path_factory.mktemp("family"), request.param.partition(" in ")
    if name.startswith("deepseek_v4"):
        make_deepseek_v4(path / "plain", **PUBLISHED)
        return publish(path / "plain", path / "published") if name.endswith("published") else path / "plain"
    make_checkpoint(path / "plain", ALL_CASES[name].family, **ALL_CASES[name].config)
    if not form:
        return path / "plain"
    if form == "MXFP4":
        to_mxfp4(path / "plain", path / "packed")
    else:
        to_format(path / "plain", path / "packed", form)
    return path / "packed"


def load(folder: Path) -> None:
    load_model(ModelConfig(model=str(folder), device="cpu"))


def names(tensors: Tensors) -> list[str]:
    """A tensor of every kind, of whichever layer and expert."""
    return list({re.sub(r"\.\d+\.", ".N.", name): name for name in tensors}.values())


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


def continuation(folder: Path) -> list[int]:
    engine = make_engine(str(folder), max_model_len=128, dtype="float32")
    (whole,) = run(engine, [make_request("one", prompt(40), max_tokens=12)])
    return whole.token_ids


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("llama3", "model.layers.1.self_attn.q_norm.bias"),
        ("nemotron_h with experts", "backbone.layers.3.mixer.gate_proj.bias"),
    ],
)
def test_tensors_that_no_layer_reads_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, bias: str
) -> None:
    make_checkpoint(tmp_path, ALL_CASES[name].family, **ALL_CASES[name].config)
    unread = {bias: torch.ones(64), f"{bias.rpartition('.')[0]}.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(tmp_path / FILE) | unread, tmp_path / FILE, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, "transom.worker"):
        continuation(tmp_path)
    assert f"1 tensors of its layers are not used, such as {bias}" in caplog.text


def expanded(names: str) -> set[str]:
    found, todo = set(), names.split()
    while todo:
        name = todo.pop()
        if match := re.search(r"{([^{}]*)}", name):
            todo += [name[: match.start()] + part + name[match.end() :] for part in match[1].split(",")]
        else:
            found.add(f"model.layers.N{name}" if name.startswith(".") else name)
    return found


def wrapped(name: str, prefix: str) -> str:
    return f"language_model.{name}" if prefix == OLDER and "lm_head" in name else re.sub("^model.", prefix, name)


def stacked(tensors: Tensors) -> None:
    """All experts of a layer in two tensors."""
    for prefix in {name.split("0.gate_proj")[0] for name in tensors if "experts.0.gate_proj" in name}:
        count = sum(name.startswith(prefix) for name in tensors) // len(PARTS)
        parts = [torch.stack([tensors.pop(f"{prefix}{i}.{part}.weight") for i in range(count)]) for part in PARTS]
        tensors |= {f"{prefix}gate_up_proj": torch.cat(parts[:2], dim=1), f"{prefix}down_proj": parts[2]}


def split(tensors: Tensors) -> None:
    """A tensor for each expert and matrix, as tools that quantise write them."""
    for prefix in [name.removesuffix("gate_up_proj") for name in tensors if name.endswith("experts.gate_up_proj")]:
        stacks = (*tensors.pop(f"{prefix}gate_up_proj").chunk(2, dim=1), tensors.pop(f"{prefix}down_proj"))
        for part, stack in zip(PARTS, stacks, strict=True):
            tensors |= {f"{prefix}{i}.{part}.weight": matrix.contiguous() for i, matrix in enumerate(stack)}


def split_columns(tensors: Tensors) -> None:
    """The same of experts whose matrices are stored transposed."""
    tensors |= {
        name: stack.transpose(1, 2) for name, stack in tensors.items() if "experts." in name and stack.dim() == 3
    }
    split(tensors)


def with_dense_mlps(tensors: Tensors) -> None:
    """Transformers saves the first layers' MLP as if it were experts."""
    for name in [name for name in tensors if re.search(r"block_sparse_moe\.\w+_proj", name)]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


STORES: dict[str, Callable[[Path, Path], object]] = {"gpt-oss": to_mxfp4, "Qwen 3 MoE in fp8": to_fp8}
REGROUPED: dict[str, Callable[[Tensors], object]] = {
    **{name: stacked for name in ("Qwen3.5 MoE", "DeepSeek V3 stacked")},
    **{"Gemma 4 26B split": split, "Llama 4 split": split_columns, "Kimi Linear": with_dense_mlps},
}


@pytest.mark.parametrize("model", MODELS)
def test_published_names(tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture) -> None:
    case, prefix, names = MODELS[model]
    family, config = ALL_CASES[case].family, ALL_CASES[case].config | {"mlp_only_layers": []}
    plain, target = make_checkpoint(tmp_path / "plain", family, **config), tmp_path / "published"
    STORES.get(model, shutil.copytree)(plain, target)
    tensors = load_file(target / FILE)
    REGROUPED.get(model, len)(tensors)
    tensors = {wrapped(name, prefix): tensor for name, tensor in tensors.items()}
    found = {re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in tensors}
    assert found == {wrapped(name, prefix) for name in expanded(names)}
    beside = expanded(f"{BESIDE} {OWN_BESIDE.get(model, '')}")
    zeros = {name.replace(".N.", ".0."): torch.zeros(4) for name in beside}
    save_file(tensors | zeros, target / FILE, metadata={"format": "pt"})
    if prefix != PLAIN:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({"model_type": "a wrapper", "text_config": config}))
    with caplog.at_level(logging.WARNING, "transom.worker"):
        assert continuation(target) == continuation(plain)
    assert "not used" not in caplog.text


def test_published_configs() -> None:
    glm, nemotron = CONFIGS["glm-5.1"], CONFIGS["nemotron-3-nano-30b-a3b"]
    same = read_architecture(glm)
    assert read_architecture(glm | {"index_share_for_mtp_iteration": True}) == same  # GLM-5.2
    assert read_architecture(glm | {"layer_types": ["deepseek_sparse_attention"] * 78}) == same  # transformers 5.2
    endless = read_architecture(nemotron | {"time_step_limit": [0.0, 1e308]})  # Nemotron 3 Ultra
    assert endless == read_architecture(nemotron)
    for family, theta in (("mixtral", 1e6), ("llama4_text", 5e5)):  # defaults, which a saved config may lack
        ropes = read_architecture(SMALL | {"model_type": family, "attention_chunk_size": 8}).ropes
        assert {rope.theta for rope in ropes if rope is not None} == {theta}
    older = {"quant_algo": "FP8", "producer": {"name": "modelopt"}}  # Qwen3-32B-FP8-Static-PerTensor
    assert read_scheme(older) == read_scheme(older | {"quant_method": "modelopt"})
