"""Attention and norms of one layer, loaded as a family's `Style` says.

Legend: H query heads and KV heads, D head width.
"""

from __future__ import annotations

import torch

from transom_worker.layers.attention import Attention, AttentionOptions, AttentionShape
from transom_worker.layers.linear import Linear
from transom_worker.layers.norm import AllHeadsNorm, HeadNorm, LayerNorm, Norm
from transom_worker.layers.rope import RotaryEmbedding
from transom_worker.models.architecture import Architecture, LayerAttention
from transom_worker.models.frequencies import frequencies
from transom_worker.models.loading import Loader
from transom_worker.models.rope import Rope
from transom_worker.models.style import Style


def make_attention(architecture: Architecture, index: int, style: Style, load: Loader) -> Attention:
    """The attention of layer `index`; `load` reads names within `self_attn`."""
    layer, rope = architecture.layers[index], architecture.ropes[index]
    eps, rotates = architecture.rms_norm_eps, rope is not None
    qkv = _projections(architecture, index, load)
    widths = (architecture.hidden_size, layer.num_heads * (layer.value_size or layer.head_size))
    output = load.linear("o_proj", bias=architecture.output_bias, shapes=[widths])
    options = AttentionOptions(
        scale=architecture.scales.query,
        soft_cap=architecture.scales.attention_cap,
        sink_logits=_sinks(layer, style, load) if index in architecture.sink_layers else None,
        value_scale=architecture.scales.value,
        norm=_head_norm(architecture, layer, style, load),
        norm_after_rotation=HeadNorm(None, eps) if rotates and style.head_norm_after_rotation else None,
        value_norm=HeadNorm(None, eps) if style.value_norm else None,
    )
    return Attention(qkv, output, attention_shape(layer), options)


def _projections(architecture: Architecture, index: int, load: Loader) -> Linear:
    """Queries, keys and values fused; queries alone where the layer reads another's cache."""
    layer, rope, bias = architecture.layers[index], architecture.ropes[index], architecture.attention_bias
    queries, keys = ((n * layer.head_size, architecture.hidden_size) for n in (layer.num_heads, layer.num_kv_heads))
    if layer.reads_cache_of is not None:
        return load.linear("q_proj", bias=bias, shapes=[queries])
    pairs = (layer.num_heads, layer.num_kv_heads, None) if rope is not None and rope.interleaved else ()
    keys_are_values = architecture.keys_are_values and layer.window is None
    names = ("q_proj", "k_proj", "k_proj" if keys_are_values else "v_proj")
    values = (layer.num_kv_heads * (layer.value_size or layer.head_size), architecture.hidden_size)
    return load.linear(*names, bias=bias, pairs_of=pairs, shapes=(queries, keys, values))


def _sinks(layer: LayerAttention, style: Style, load: Loader) -> torch.Tensor:
    """One learned sink per head in float32; no sink is one of minus infinity."""
    return load.tensor(style.sink_logits, torch.float32, shape=(layer.num_heads,))


def attention_shape(layer: LayerAttention) -> AttentionShape:
    """A layer's heads and what they see."""
    return AttentionShape(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        window=layer.window,
        num_sink_tokens=layer.sinks,
        chunk=layer.chunk,
        value_size=layer.value_size,
        has_cache=layer.reads_cache_of is None,
    )


def make_norm(name: str, architecture: Architecture, style: Style, load: Loader) -> Norm:
    """A norm over rows, of the family's kind."""
    size = architecture.hidden_size
    if style.norm_takes_mean:
        return LayerNorm(load.tensor(f"{name}.weight", shape=(size,)), architecture.rms_norm_eps)
    plus_one, wide = style.norm_plus_one, style.norm_wide
    return load.norm(name, architecture.rms_norm_eps, size=size, plus_one=plus_one, wide=wide)


def _head_norm(
    architecture: Architecture, layer: LayerAttention, style: Style, load: Loader
) -> HeadNorm | AllHeadsNorm | None:
    if style.head_norm == "none":
        return None
    dtype = torch.float32 if style.norm_plus_one or style.norm_wide else load.dtype
    query_heads, key_heads = (layer.num_heads, layer.num_kv_heads) if style.head_norm == "all" else (1, 1)
    query = load.tensor("q_norm.weight", dtype, shape=(query_heads * layer.head_size,))
    if layer.reads_cache_of is not None:
        weight_HD = query.expand(layer.num_heads, -1)
    else:
        key = load.tensor("k_norm.weight", dtype, shape=(key_heads * layer.head_size,))
        if style.head_norm == "all":
            return AllHeadsNorm(query, key, architecture.rms_norm_eps)
        weight_HD = torch.cat([query.expand(layer.num_heads, -1), key.expand(layer.num_kv_heads, -1)])
    return HeadNorm(weight_HD + 1.0 if style.norm_plus_one else weight_HD, architecture.rms_norm_eps)


def make_rotary(rope: Rope, load: Loader) -> RotaryEmbedding:
    """Interleaved pairs were set apart when the weights were loaded."""
    return RotaryEmbedding(frequencies(rope, load.device), dtype=load.dtype, scale=rope.attention_factor)
