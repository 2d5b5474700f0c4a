"""A GGUF file's metadata as the `config.json` that its model would have. No torch."""

from __future__ import annotations

import math
import struct
from typing import Any

from transom_worker.errors import ModelError
from transom_worker.gguf_header import GgufHeader

# llama.cpp's name of an architecture -> config.json's model_type and what all its models have.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"},
    "gemma2": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
# config.json's name -> llama.cpp's after the architecture's
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
# llama.cpp knows by the number of layers that these divide by the hidden size's share of a head, not by the head's width.
_SCORES_BY_HIDDEN_SIZE = {("gemma2", 46), ("gemma3", 62)}
_DTYPE_OF_GGML_TYPE = {0: "float32", 1: "float16"}  # others (bf16, every quantisation) are served in bfloat16
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(header: GgufHeader) -> dict[str, Any]:
    """`config.json` of a GGUF file.

    Raises:
        ModelError: an architecture that is not supported, or metadata that it needs and lacks.
    """
    name = header.require("general.architecture")
    if name not in FAMILIES or header.metadata.get(f"{name}.expert_count", 0):
        kind = f"{name} with experts" if name in FAMILIES else repr(name)
        raise ModelError(
            f"{header.path} has architecture {kind}; GGUF models supported so far: {', '.join(map(repr, FAMILIES))} (dense)."
        )
    config = {ours: _number(header, f"{name}.{key}") for ours, key in _REQUIRED.items()}
    given = {ours: header.metadata.get(f"{name}.{key}") for ours, key in _OPTIONAL.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    matrix = header.tensors.get("blk.0.attn_q.weight")
    return {
        **config,
        **FAMILIES[name],
        **{ours: value for ours, value in given.items() if value is not None},
        **_query_scalar(header, name, config),
        "num_key_value_heads": _number(header, f"{name}.attention.head_count_kv", default=heads),
        "head_dim": _number(header, f"{name}.attention.key_length", default=hidden // heads),
        "rope_theta": _number(header, f"{name}.rope.freq_base", default=10_000.0),
        "rope_scaling": _rope_scaling(header, name),
        "vocab_size": _number(header, f"{name}.vocab_size", default=len(header.require("tokenizer.ggml.tokens"))),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors and name != "qwen2",  # there on inputs alone
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _DTYPE_OF_GGML_TYPE.get(matrix.ggml_type, "bfloat16") if matrix else "bfloat16",
    }


def generation_config_of(header: GgufHeader) -> dict[str, Any]:
    """`generation_config.json` of a GGUF file."""
    ids = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    stops = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    found = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "eos_token_id": list(dict.fromkeys(stops))}
    return {name: value for name, value in found.items() if value not in (None, [])}


def _number(header: GgufHeader, key: str, *, default: float | None = None) -> Any:
    value = header.require(key) if default is None else header.metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{header.path}: {key} differs by layer; supported so far: the same in all layers.")
        value = value[0]
    return value


def _query_scalar(header: GgufHeader, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma divides scores by the root of; GGUF does not say."""
    if not name.startswith("gemma"):
        return {}
    share = config["hidden_size"] // config["num_attention_heads"]
    if (name, config["num_hidden_layers"]) in _SCORES_BY_HIDDEN_SIZE:
        return {"query_pre_attn_scalar": share}
    return {"query_pre_attn_scalar": _number(header, f"{name}.attention.key_length", default=share)}


def _rope_scaling(header: GgufHeader, name: str) -> dict[str, Any] | None:
    """Llama 3's comes as the factors that its published parameters make; the slowest pair's is the whole factor."""
    if "rope_freqs.weight" in header.tensors:
        return {"rope_type": "llama3", "factor": _last_float(header, "rope_freqs.weight"), **_LLAMA3_ROPE}
    kind = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": _number(header, f"{name}.rope.scaling.factor", default=1.0),
        "original_max_position_embeddings": header.metadata.get(f"{name}.rope.scaling.original_context_length"),
    }


def _last_float(header: GgufHeader, name: str) -> float:
    tensor = header.tensors[name]
    with header.path.open("rb") as file:
        file.seek(tensor.offset + 4 * (math.prod(tensor.shape) - 1))
        data = file.read(4)
    if tensor.ggml_type != 0 or len(data) != 4:
        raise ModelError(f"{header.path}: tensor {name!r} is cut off or not F32; download it again.")
    return float(struct.unpack("<f", data)[0])
