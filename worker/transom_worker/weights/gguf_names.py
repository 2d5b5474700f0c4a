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
# By config.json's model_type.
NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, **_HEAD_NORMS},
}
NOT_WEIGHTS = ("rope_freqs.weight",)  # made from the config
# llama.cpp's converter changes these; reading them changes them back.
PAIRS_SIDE_BY_SIDE = ("llama",)  # rows of q and k in each head
NORMS_PLUS_ONE = ("gemma2", "gemma3_text")
