"""llama.cpp's tensor names, without ".weight" or ".bias", and Hugging Face's; {} is the layer."""

from __future__ import annotations

from collections.abc import Mapping

_ATTENTION = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_LLAMA = {**_ATTENTION, "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm"}
_NORMS_AND_ATTENTION = {key: name for key, name in _LLAMA.items() if key == "blk.{}.ffn_norm" or ".ffn_" not in key}
_HEAD_NORMS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
_GEMMA = {
    **_ATTENTION,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


def _experts(place: str, router: str) -> dict[str, str]:
    """Each of three stacks of all experts under a name of its own; see `gguf_experts`."""
    layer = f"model.layers.{{}}.{place}"
    stacks = {f"blk.{{}}.ffn_{part}_exps": f"{layer}.experts.{part}" for part in ("gate", "up", "down")}
    return {**_NORMS_AND_ATTENTION, "blk.{}.ffn_gate_inp": f"{layer}.{router}", **stacks}


def _dense(place: str, suffix: str = "") -> dict[str, str]:
    return {f"blk.{{}}.ffn_{part}{suffix}": f"model.layers.{{}}.{place}.{part}_proj" for part in ("gate", "up", "down")}


# By config.json's model_type.
NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, **_HEAD_NORMS},
    "cohere2": _ATTENTION,
    "smollm3": _LLAMA,
    "olmo3": {
        **{key: name for key, name in _ATTENTION.items() if key != "blk.{}.attn_norm"},
        **_HEAD_NORMS,
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    "mixtral": _experts("block_sparse_moe", "gate"),
    "qwen3_moe": {**_experts("mlp", "gate"), **_HEAD_NORMS},
    "gpt_oss": {
        **{key: name for key, name in _experts("mlp", "router").items() if key != "blk.{}.ffn_norm"},
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.attn_sinks": "model.layers.{}.self_attn.sinks",
    },
    "llama4_text": {
        **_experts("feed_forward", "router"),
        **_dense("feed_forward"),
        **_dense("feed_forward.shared_expert", "_shexp"),
    },
}
PARAMETERS = ("self_attn.sinks",)  # Hugging Face calls these so, without ".weight"
NOT_WEIGHTS = ("rope_freqs.weight",)  # made from the config
# llama.cpp's converter changes these; reading them changes them back.
PAIRS_SIDE_BY_SIDE = ("llama", "mixtral", "smollm3")  # rows of q and k in each head
NORMS_PLUS_ONE = ("gemma2", "gemma3_text")
