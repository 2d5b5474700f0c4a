"""GGUF files as llama.cpp's converter writes them: metadata and tensor names by the package's own tables."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, PreTrainedTokenizerFast

from transom_core.model_files.resolve import resolve_model
from transom_worker.models.weights.load import load_weights

ARCHITECTURES = {  # Hugging Face's name -> llama.cpp's, where they differ
    "mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "olmo3": "olmo2", "llama4_text": "llama4",
    "gemma3_text": "gemma3",
}  # fmt: skip
WITH_WINDOWS = ("cohere2", "gpt_oss", "olmo3", "gemma2", "gemma3_text")
ROTATED_BY_PAIRS = ("llama", "mixtral", "smollm3")  # llama.cpp orders their rows of q and k by pairs


def write_gguf(
    path: Path,
    folder: Path,
    kind: Kind = Kind.F32,
    *,
    experts: Kind | None = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Convert the checkpoint in `folder`: matrices in `kind`, those of experts in `experts`. The vocabulary is a stub without a
    `tokenizer`."""
    config, weights = AutoConfig.from_pretrained(folder), load_weights(resolve_model(str(folder)))
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, config)
    if tokenizer is None:
        writer.add_token_list(["x"])
    else:
        _add_vocabulary(writer, tokenizer)
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(keys[arch], config.num_hidden_layers)
    for name, tensor in _in_llama_cpps_form({name: weights(name) for name in weights.names}, config):
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        wanted = kind if experts is None or not found.endswith("_exps.weight") else experts
        wanted = wanted if tensor.dim() > 1 else Kind.F32
        writer.add_tensor(found, gguf.quantize(tensor.contiguous().numpy(), wanted), raw_dtype=wanted)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    return finish(writer, path)


def write_small_gguf(path: Path, *, architecture: str = "llama", **more: int) -> Path:
    """Write a file of one layer's metadata and one tensor; `more` are integers by key, with `__` for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "ü"])
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.add_tensor("output.weight", np.ones((3, 8), dtype=np.float32))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    get: Callable[..., Any] = lambda name, default=None: getattr(config, name, default)  # noqa: E731
    family = config.model_type
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(get("intermediate_size_mlp") or config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(get("head_dim") or config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if family == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family in WITH_WINDOWS:
        writer.add_sliding_window(config.sliding_window)
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    _add_experts(writer, config)
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


def _add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
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


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a byte-level vocabulary with its merges and its chat template."""
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _in_llama_cpps_form(tensors: dict[str, torch.Tensor], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts in stacks, gates apart from ups, llama's rotary order of q and k rows, Gemma's norm weights with one added."""
    stacks: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name):
            place = found[1].replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            place = place if config.model_type == "mixtral" else found[1]
            stacks[f"{place}.{found[3]}"][int(found[2])] = tensor
        elif ".experts." in name:
            yield from _apart(name, tensor, interleaved=config.model_type == "gpt_oss")
        elif name.endswith("lm_head.weight") and config.tie_word_embeddings:
            continue
        elif config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif config.model_type in ROTATED_BY_PAIRS and re.search(r"\.[qk]_proj\.weight", name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            yield name, tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        else:
            yield name + (".weight" if name.endswith(".sinks") else ""), tensor
    for name, stack in stacks.items():
        yield name, torch.stack([stack[expert] for expert in range(len(stack))])


def _apart(name: str, tensor: torch.Tensor, *, interleaved: bool) -> Iterator[tuple[str, torch.Tensor]]:
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
