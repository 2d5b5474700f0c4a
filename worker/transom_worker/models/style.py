"""The options in which the families of the shared `Decoder` differ, besides sizes: norms, kind of residual, feed-forward network.

Sizes, attention windows, NoPE layers, biases and factors are in `Architecture`, which is read from config.json; a `Style` is
written in code for each family: of dense families here, of those with experts in `mixtures`. docs/models.md has them in words.

Sources: the classes of these names in transformers (`models/<family>/modeling_<family>.py`).

Legend: T tokens, N hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from transom_core.model_config.architecture import Architecture
from transom_worker.models.layers.residual import Sublayer
from transom_worker.models.loading import Loader


class FeedForward(Sublayer[[torch.Tensor]], Protocol):
    """The feed-forward network of a layer: a dense MLP or an MoE layer. It maps `x` [T, N] to its output [T, N]."""

    weight_bytes: int


# Loads the feed-forward network of layer `index`; the loader reads names within the layer.
MakeFeedForward = Callable[[Architecture, int, Loader], FeedForward]


def dense_feed_forward(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    """Load the dense MLP of layer `index`."""
    mixture, reads = architecture.mixture, architecture.layers[index].reads_cache_of is not None
    inner = architecture.intermediate_size if mixture is None else mixture.dense_size
    # In some Gemma 4 models, the MLP of a layer without its own KV cache is twice as wide.
    sizes = (architecture.hidden_size, inner * (2 if reads and architecture.readers_are_wide else 1))
    limits = None if mixture is None else dict(mixture.dense_limits).get(index)
    return load.mlp(architecture.gate_activation, sizes, bias=architecture.mlp_bias, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a family assembles its layers; the default is llama's.

    Norms are named as in the checkpoint, within a layer; "" means that the family has no such norm.
    """

    norm_before_attention: str = "input_layernorm"
    norm_after_attention: str = ""
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_mlp: str = ""
    parallel_residual: bool = False  # attention and feed-forward network read the same norm and are added at once
    norm_takes_mean: bool = False  # LayerNorm instead of RMS norm
    norm_plus_one: bool = False  # the checkpoint holds norm weights minus 1; they multiply in float32
    norm_wide: bool = False  # norm weights multiply in float32
    # RMS norm of queries and keys before RoPE: of each head, or over all heads.
    qk_norm: Literal["none", "each", "all"] = "none"
    value_norm: bool = False  # RMS norm of each value head without a weight
    output_gate: str = ""  # name of the projection whose sigmoid multiplies attention's output; "": none
    gates_heads: bool = False  # the projection gives one number for each head
    sink_logits: str = ""  # name of the sinks' tensor within attention, for the architecture's `sink_layers`; "": none
    feed_forward: MakeFeedForward = dense_feed_forward
    recurrent: Style | None = None  # of recurrent layers, if theirs is another one


_GEMMA = Style(
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
    norm_plus_one=True,
)
_GLM4 = Style(norm_after_attention="post_self_attn_layernorm", norm_after_mlp="post_mlp_layernorm")
_NORMS_AFTER = Style(
    norm_before_attention="",
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="",
    norm_after_mlp="post_feedforward_layernorm",
)
_OLMO = replace(_NORMS_AFTER, norm_wide=True, qk_norm="all")
_PLAIN = (
    *("llama", "smollm3", "mistral", "ministral", "ministral3", "granite", "phi3"),
    *("seed_oss", "qwen2", "youtu", "falcon_h1", "cwm", "arcee", "glm", "ernie4_5"),
)
_LFM2 = Style(norm_before_attention="operator_norm", norm_before_mlp="ffn_norm", qk_norm="each")
DENSE_STYLES = {
    **dict.fromkeys(_PLAIN, Style()),
    "qwen3": Style(qk_norm="each"),
    "qwen3_5_text": Style(qk_norm="each", norm_plus_one=True, output_gate="q_gate"),
    "lfm2": _LFM2,
    "lfm3": replace(
        _LFM2,
        norm_after_attention="post_operator_norm",
        norm_after_mlp="post_ffn_norm",
        output_gate="gate_proj",
        gates_heads=True,
    ),
    "granite_swa": Style(sink_logits="sinks"),
    "glm4": _GLM4,
    "gemma": Style(norm_plus_one=True),
    "vaultgemma": replace(_GEMMA, norm_after_attention="", norm_after_mlp=""),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, qk_norm="each"),
    "olmo_hybrid": replace(
        _OLMO,
        recurrent=Style(
            norm_before_attention="attention_layer_norm", norm_before_mlp="feedforward_layer_norm", norm_wide=True
        ),
    ),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": replace(_NORMS_AFTER, qk_norm="each"),
    "cohere2": Style(norm_before_mlp="", parallel_residual=True, norm_takes_mean=True),
}
