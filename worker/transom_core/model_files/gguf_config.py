"""Translates a GGUF file's metadata into the `config.json` that its model has on Hugging Face. Imports no torch."""

import math
import struct
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_files.gguf_header import GgufHeader

# llama.cpp's name of an architecture -> config.json's model_type. "olmo2" names OLMo 2 and 3; only OLMo 3 has windows.
FAMILIES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "cohere2", "smollm3")},
    "gemma3": "gemma3_text",
    "olmo2": "olmo3",
}
# The same for mixture-of-experts models (files with an expert count).
MIXTURES = {"llama": "mixtral", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "llama4": "llama4_text"}
# model_type -> fields of config.json that are equal in all models of the family; others have `hidden_act` alone. The files lack
# them: llama.cpp's code has them.
_FIXED: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh"},
    "qwen3_moe": {"hidden_act": "silu", "norm_topk_prob": True},
    "llama4_text": {"hidden_act": "silu", "attention_chunk_size": 8192},
}
# name in config.json -> name in the file's metadata, after the architecture's name and a dot
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EXPERT_SIZE = "expert_feed_forward_length"
# Names by model_type that replace or extend `_REQUIRED`; "" removes one.
_REQUIRED_BY: dict[str, dict[str, str]] = {
    "mixtral": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": _EXPERT_SIZE},
    "gpt_oss": {**_EXPERTS, "intermediate_size": _EXPERT_SIZE, "sliding_window": "attention.sliding_window"},
    "llama4_text": {
        **_EXPERTS,
        "intermediate_size": _EXPERT_SIZE,
        "intermediate_size_mlp": "feed_forward_length",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    "cohere2": {
        "rms_norm_eps": "",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "logit_scale": "logit_scale",
        "sliding_window": "attention.sliding_window",
    },
    "olmo3": {"sliding_window": "attention.sliding_window"},
}
_OPTIONAL = {
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
# (family, number of layers) of models that scale scores by hidden_size / num_heads instead of the head size; llama.cpp, too,
# recognises them by their number of layers.
_SCORES_BY_HIDDEN_SIZE = {("gemma2", 46), ("gemma3", 62)}
_DTYPE_OF_GGML_TYPE = {0: "float32", 1: "float16"}  # other types (bf16, every quantisation) run in bfloat16
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA4_ROPE = {**_LLAMA3_ROPE, "high_freq_factor": 1.0}
_YARN = {
    "attention_factor": ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"),
    "beta_fast": ("rope.scaling.yarn_beta_fast",),
    "beta_slow": ("rope.scaling.yarn_beta_slow",),
}
_UNSET = (None, 1.0)  # a factor of 1 changes nothing: llama.cpp multiplies YaRN's default by it
_EXPERTS_WITHOUT_QK_NORM = 128  # the experts of Llama 4 Maverick, by which llama.cpp tells it from Scout


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the `config.json` of a GGUF file's model.

    Raises:
        ModelError: the architecture is not supported, or the file lacks metadata that it needs.
    """
    if (num_parts := header.metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(f"{header.path} is one of {num_parts} parts; join them with `llama-gguf-split --merge`.")
    name = header.require("general.architecture")
    family = _family(header, name)
    required = {**_REQUIRED, **_REQUIRED_BY.get(family, {})}
    config = {ours: _number(header, f"{name}.{key}") for ours, key in required.items() if key}
    given = {ours: header.metadata.get(f"{name}.{key}") for ours, key in _OPTIONAL.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    matrix = header.tensors.get("blk.0.attn_q.weight")
    return {
        **config,
        "model_type": family,
        **_FIXED.get(family, {"hidden_act": "silu"}),
        **{ours: value for ours, value in given.items() if value is not None},
        **_query_scalar(header, name, config),
        **_layer_rules(header, name, config),
        "num_key_value_heads": _number(header, f"{name}.attention.head_count_kv", default=heads),
        "head_dim": _number(header, f"{name}.attention.key_length", default=hidden // heads),
        "rope_theta": _number(header, f"{name}.rope.freq_base", default=10_000.0),
        "rope_scaling": _rope_scaling(header, name),
        "vocab_size": _number(header, f"{name}.vocab_size", default=len(header.require("tokenizer.ggml.tokens"))),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        # Qwen 2 has biases only on q, k and v.
        "attention_bias": "blk.0.attn_q.bias" in header.tensors and name != "qwen2",
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "dtype": _DTYPE_OF_GGML_TYPE.get(matrix.ggml_type, "bfloat16") if matrix else "bfloat16",
    }


def _family(header: GgufHeader, name: str) -> str:
    has_experts = bool(header.metadata.get(f"{name}.expert_count", 0))
    known = MIXTURES if has_experts else FAMILIES
    # OLMo 2 and 3 both have the name "olmo2"; files without windows are OLMo 2.
    fits = name != "olmo2" or bool(header.metadata.get("olmo2.attention.sliding_window"))
    if name in known and fits:
        return known[name]
    if name not in FAMILIES and name not in MIXTURES:
        kind = ""
    elif has_experts:
        kind = " with experts"
    else:
        kind = " without experts" if fits else " without windows"
    raise ModelError(
        f"{header.path} has architecture {name!r}{kind}; GGUF models supported so far: "
        f"{', '.join(map(repr, FAMILIES))} (dense; olmo2 with windows), "
        f"{', '.join(map(repr, MIXTURES))} (with experts)."
    )


def _layer_rules(header: GgufHeader, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields about layers with windows or QK norms, for families whose models differ in these."""
    match name:
        case "olmo2":
            pattern = header.require("olmo2.attention.sliding_window_pattern")
            if not isinstance(pattern, list) or len(pattern) < config["num_hidden_layers"]:
                raise ModelError(f"{header.path}: olmo2.attention.sliding_window_pattern does not list every layer.")
            kinds = ("full_attention", "sliding_attention")
            return {"layer_types": [kinds[bool(windowed)] for windowed in pattern[: config["num_hidden_layers"]]]}
        case "llama4":
            if "llama4.attention.sliding_window" in header.metadata:
                raise ModelError(
                    f"{header.path} has llama4.attention.sliding_window; of Llama 4, models with chunks of 8192 are supported."
                )
            return {"use_qk_norm": config["num_local_experts"] != _EXPERTS_WITHOUT_QK_NORM}
    return {}


def generation_config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the `generation_config.json` of a GGUF file's model."""
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
    """Return Gemma's `query_pre_attn_scalar`, whose square root divides the scores; GGUF files do not have it."""
    if not name.startswith("gemma"):
        return {}
    share = config["hidden_size"] // config["num_attention_heads"]
    if (name, config["num_hidden_layers"]) in _SCORES_BY_HIDDEN_SIZE:
        return {"query_pre_attn_scalar": share}
    return {"query_pre_attn_scalar": _number(header, f"{name}.attention.key_length", default=share)}


def _rope_scaling(header: GgufHeader, name: str) -> dict[str, Any] | None:
    """Return the `rope_scaling` of config.json. Llama 3's is stored as one factor per frequency; the lowest frequency, the last,
    has the whole factor."""
    if "rope_freqs.weight" in header.tensors:
        rest = _LLAMA4_ROPE if name == "llama4" else _LLAMA3_ROPE
        return {"rope_type": "llama3", "factor": _last_float(header, "rope_freqs.weight"), **rest}
    kind = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    given = {ours: [header.metadata.get(f"{name}.{key}") for key in keys] for ours, keys in _YARN.items()}
    return {
        "rope_type": kind,
        "factor": _number(header, f"{name}.rope.scaling.factor", default=1.0),
        "original_max_position_embeddings": header.metadata.get(f"{name}.rope.scaling.original_context_length"),
        **{ours: value for ours, values in given.items() for value in values[::-1] if value not in _UNSET},
        # As in gpt-oss's published config.json; the files do not have it.
        **({"truncate": False} if name == "gpt-oss" else {}),
    }


def _last_float(header: GgufHeader, name: str) -> float:
    tensor = header.tensors[name]
    with header.path.open("rb") as file:
        file.seek(tensor.offset + 4 * (math.prod(tensor.shape) - 1))
        data = file.read(4)
    if tensor.ggml_type != 0 or len(data) != 4:
        raise ModelError(f"{header.path}: tensor {name!r} is cut off or not F32; download it again.")
    return float(struct.unpack("<f", data)[0])
