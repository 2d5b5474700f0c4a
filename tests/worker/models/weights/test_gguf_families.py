"""GGUF of families with experts, windows or norms of their own: under llama.cpp's names, as its converter writes them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import greedy, load_oracle, make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from transom_core.errors import ModelError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.resolve import resolve_model
from transom_worker.models.weights import load_weights

Tensors = dict[str, torch.Tensor]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 256,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A family by Hugging Face's name and llama.cpp's, and a config."""

    family: str
    arch: str
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "mixtral": Case(family="mixtral", arch="llama", config={"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": Case(
        family="qwen3_moe",
        arch="qwen3moe",
        config={"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gpt_oss": Case(
        family="gpt_oss",
        arch="gpt-oss",
        config={
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 16,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "cohere2": Case(family="cohere2", arch="cohere2", config={"sliding_window": 24, "logit_scale": 0.25}),
    "smollm3": Case(family="smollm3", arch="smollm3"),
    "olmo3": Case(
        family="olmo3",
        arch="olmo2",
        config={
            "sliding_window": 20,
            "layer_types": WINDOWS,
            "rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": YARN | {"attention_factor": 1.2}},
        },
    ),
    "llama4": Case(
        family="llama4_text",
        arch="llama4",
        config={
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
        },
    ),
}


def write_gguf(path: Path, folder: Path, arch: str, *, experts: Kind = Kind.F32, tokenizer: bool = False) -> Path:
    """What llama.cpp's converter makes of a checkpoint: metadata and tensors by the package's own tables."""
    config, weights = load_oracle(folder).config, load_weights(resolve_model(str(folder)))
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, config)
    if tokenizer:
        add_tokenizer(writer, PreTrainedTokenizerFast.from_pretrained(folder))
    else:
        writer.add_token_list(["x"])
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, tensor in in_llama_cpps_form({name: weights(name) for name in weights.names}, config):
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        kind = experts if found.endswith("_exps.weight") else Kind.F32
        writer.add_tensor(found, gguf.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    get: Callable[..., Any] = lambda name, default=None: getattr(config, name, default)  # noqa: E731
    family = config.model_type
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(get("intermediate_size_mlp") or config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_vocab_size(config.vocab_size)
    if family == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if get("sliding_window") and family in ("cohere2", "gpt_oss", "olmo3"):
        writer.add_sliding_window(config.sliding_window)
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    add_experts(writer, config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        own = getattr(config, "moe_intermediate_size", None)
        writer.add_expert_feed_forward_length(own or config.intermediate_size)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_token_merges([])


def in_llama_cpps_form(tensors: Tensors, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts in stacks, gates apart from ups, llama's rotary order of q and k rows."""
    stacks: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name):
            place = found[1].replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            place = place if config.model_type == "mixtral" else found[1]
            stacks[f"{place}.{found[3]}"][int(found[2])] = tensor
        elif ".experts." in name:
            yield from apart(name, tensor, interleaved=config.model_type == "gpt_oss")
        elif name.endswith("lm_head.weight") and config.tie_word_embeddings:
            continue
        elif config.model_type in ("mixtral", "smollm3") and re.search(r"\.[qk]_proj\.weight", name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            yield name, tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        else:
            yield name + (".weight" if name.endswith(".sinks") else ""), tensor
    for name, stack in stacks.items():
        yield name, torch.stack([stack[expert] for expert in range(len(stack))])


def apart(name: str, tensor: torch.Tensor, *, interleaved: bool) -> Iterator[tuple[str, torch.Tensor]]:
    is_bias = name.endswith("_bias")
    tensor = tensor if is_bias else tensor.transpose(1, 2)
    name = name.removesuffix("_bias") + (".bias" if is_bias else ".weight")
    if "gate_up_proj" not in name:
        yield name, tensor
        return
    half = tensor.shape[1] // 2
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if interleaved else (tensor[:, :half], tensor[:, half:])
    yield name.replace("gate_up_proj", "gate_proj"), gate
    yield name.replace("gate_up_proj", "up_proj"), up


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_architecture_are_the_checkpoints(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = make_checkpoint(tmp_path / "folder", case.family, **case.config)
    files = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", folder, case.arch)))
    theirs = resolve_model(str(folder))
    weights, want = load_weights(files), load_weights(theirs)
    assert set(weights.names) == set(want.names) - (
        {"lm_head.weight"} if files.config["tie_word_embeddings"] else set()
    )
    for tensor in weights.names:
        shape = tuple(want(tensor).shape)
        torch.testing.assert_close(weights(tensor, shape=shape), want(tensor), rtol=0, atol=0)
        for some in (slice(1, 3),), tuple(slice(1, size - 2) for size in shape), (slice(0, 2), slice(3, 17)):
            part = some[: len(shape)]
            got = weights(tensor, shape=shape, part=part)
            torch.testing.assert_close(got, want(tensor)[part], rtol=0, atol=0)
    ours, oracle = read_architecture(files.config), read_architecture(theirs.config)
    ropes = tuple(
        None if a is None or b is None else replace(a, attention_factor=pytest.approx(b.attention_factor))  # type: ignore[arg-type]
        for a, b in zip(ours.ropes, oracle.ropes, strict=True)
    )
    assert replace(ours, ropes=ropes) == replace(oracle, rms_norm_eps=pytest.approx(oracle.rms_norm_eps))  # type: ignore[arg-type]
    assert [rope is None for rope in ours.ropes] == [rope is None for rope in oracle.ropes]


def test_experts_in_mxfp4_are_those_of_the_package(tmp_path: Path) -> None:
    case = CASES["gpt_oss"]
    folder = make_checkpoint(tmp_path / "folder", case.family, **case.config)
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "x.gguf", folder, case.arch, experts=Kind.MXFP4))))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    want = load_weights(resolve_model(str(folder)))(name)
    rows = want.transpose(1, 2).contiguous().numpy()
    near = torch.from_numpy(gguf.dequantize(gguf.quantize(rows, Kind.MXFP4), Kind.MXFP4)).transpose(1, 2)
    got = weights(name, shape=tuple(want.shape))
    assert torch.equal(got, near)
    assert torch.equal(weights(name, part=(slice(2, 3),)), near[2:3])
    odd = (slice(2, 4), slice(33, 50), slice(3, 40))
    assert torch.equal(weights(name, shape=tuple(want.shape), part=odd), near[odd])
    assert 0 < (got - want).abs().max() < 0.25 * want.abs().max()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
def test_the_engine_writes_what_transformers_writes(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = make_checkpoint(tmp_path / "folder", case.family, **case.config)
    path = write_gguf(tmp_path / "tiny.gguf", folder, case.arch, tokenizer=True)
    engine = make_engine(str(path), block_size=8, max_model_len=256, dtype="float32")
    answer = greedy(load_oracle(folder), prompt(40))
    (whole,) = run(engine, [make_request("a", answer.prompt, max_tokens=len(answer.token_ids))])
    assert whole.token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("arch", "experts", "said"),
    [
        ("deepseek2", 4, "'deepseek2'"),
        ("qwen2", 4, "'qwen2' with experts"),
        ("qwen3moe", 0, "'qwen3moe' without experts"),
        ("olmo2", 0, "'olmo2' without windows"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, arch: str, experts: int, said: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", arch)
    writer.add_expert_count(experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"has architecture {said}; GGUF models supported so far: 'llama'"):
        resolve_model(str(tmp_path / "x.gguf"))
