"""Maps llama.cpp's tensor names to Hugging Face's, for each model family.

Names are without their ending ".weight" or ".bias"; `{}` stands for the number of the layer.
"""

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
_QK_NORMS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
_GEMMA = {
    **_ATTENTION,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


def _experts(block: str, router: str) -> dict[str, str]:
    """Return the names of a mixture of experts; llama.cpp stacks the gates, ups and downs of all experts (`gguf_experts`)."""
    layer = f"model.layers.{{}}.{block}"
    stacks = {f"blk.{{}}.ffn_{part}_exps": f"{layer}.experts.{part}" for part in ("gate", "up", "down")}
    return {**_NORMS_AND_ATTENTION, "blk.{}.ffn_gate_inp": f"{layer}.{router}", **stacks}


def _dense(block: str, suffix: str = "") -> dict[str, str]:
    return {f"blk.{{}}.ffn_{part}{suffix}": f"model.layers.{{}}.{block}.{part}_proj" for part in ("gate", "up", "down")}


# config.json's model_type -> (llama.cpp's name -> Hugging Face's name)
NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_QK_NORMS},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, **_QK_NORMS},
    "cohere2": _ATTENTION,
    "smollm3": _LLAMA,
    "olmo3": {
        **{key: name for key, name in _ATTENTION.items() if key != "blk.{}.attn_norm"},
        **_QK_NORMS,
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    "mixtral": _experts("block_sparse_moe", "gate"),
    "qwen3_moe": {**_experts("mlp", "gate"), **_QK_NORMS},
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
PARAMETERS = ("self_attn.sinks",)  # names that Hugging Face has without ".weight"
NOT_WEIGHTS = ("rope_freqs.weight",)  # ignored, because the model computes its frequencies from the config
# Families whose weights llama.cpp's converter changes; reading a tensor undoes the change.
# - rows of q and k are reordered, so that the two elements of a rotary pair are neighbours;
INTERLEAVED_ROPE = ("llama", "mixtral", "smollm3")
# - 1 is added to the weights of norms.
NORMS_PLUS_ONE = ("gemma2", "gemma3_text")
