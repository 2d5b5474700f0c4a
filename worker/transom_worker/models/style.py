"""How a family puts its layers together: what `Decoder` needs to know besides an architecture.

Legend: T tokens, N hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from transom_worker.model_config.architecture import Architecture
from transom_worker.models.loading import Loader


class FeedForward(Protocol):
    """What follows attention in a layer."""

    weight_bytes: int

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        ...

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """`residual + self(x)`, [T, N]."""
        ...


class MakeFeedForward(Protocol):
    """Loads a layer's feed-forward part; `load` reads names within the layer."""

    def __call__(self, architecture: Architecture, index: int, load: Loader) -> FeedForward:
        """Of layer `index`."""
        ...


def dense_feed_forward(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    """One gated feed-forward layer."""
    mixture, reads = architecture.mixture, architecture.layers[index].reads_cache_of is not None
    inner = architecture.intermediate_size if mixture is None else mixture.dense_size
    sizes = (architecture.hidden_size, inner * (2 if reads and architecture.readers_are_wide else 1))
    return load.mlp(architecture.gate_activation, sizes, bias=architecture.mlp_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a family puts its layers together. Norms are given by name within a layer, "" for none; the default is llama's."""

    norm_before_attention: str = "input_layernorm"
    norm_after_attention: str = ""
    norm_before_mlp: str = "post_attention_layernorm"
    norm_after_mlp: str = ""
    parallel_residual: bool = False  # attention and feed-forward layer read the same rows, and both are added at once
    norm_takes_mean: bool = False
    norm_plus_one: bool = False  # the checkpoint holds norm weights less one; they multiply in float32
    norm_wide: bool = False  # norm weights multiply in float32
    qk_norm: Literal["none", "each", "all"] = "none"  # of queries and keys before rotation
    head_norm_after_rotation: bool = False  # without a weight, in layers that rotate
    value_norm: bool = False  # each value head to one length
    sink_logits: str = ""  # their name within attention, in the architecture's `sink_layers`
    feed_forward: MakeFeedForward = dense_feed_forward
    query_scale: Callable[[torch.Tensor], torch.Tensor] | None = None  # of positions [T], in layers that do not rotate
