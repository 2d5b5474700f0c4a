"""Architectures of a few small layers, for code that plans memory and needs no weights."""

from typing import Any

from transom_core.model_config.architecture import Architecture, LayerAttention

HIDDEN = 32
HEAD = 8
KV_HEADS = 2


def architecture(layers: list[LayerAttention]) -> Architecture:
    return Architecture(
        family="toy",
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        vocab_size=64,
        max_position=512,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        checkpoint_dtype="float32",
        layers=tuple(layers),
    )


def layer(window: int | None = None, **fields: Any) -> LayerAttention:
    return LayerAttention(num_heads=KV_HEADS, num_kv_heads=KV_HEADS, head_size=HEAD, window=window, **fields)
