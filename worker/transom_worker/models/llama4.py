"""Llama 4's text decoder (Scout, Maverick).

- Most layers have chunked attention with RoPE: a query reads the keys of its own attention chunk (8,192 tokens), up to its own.
  Every fourth layer has global attention without RoPE (NoPE), and scales its queries by a factor of their position.
- Some models normalise each query and key head after the rotation, without a weight, in layers with RoPE.
- MoE layers have a shared expert besides the routed ones. A routing weight (a sigmoid) multiplies the expert's input.

Sources: the model card of Llama 4, transformers' `Llama4ForCausalLM`.

Legend: T tokens.
"""

from __future__ import annotations

from functools import partial

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.scales import PositionScale
from transom_kernels.moe import GateRule
from transom_kernels.position_scale import position_scale
from transom_kernels.route import Routing
from transom_worker.models.decoder import Decoder
from transom_worker.models.expert_loading import experts_by_stack
from transom_worker.models.layers.expert_router import ExpertRouter
from transom_worker.models.layers.experts import make_experts
from transom_worker.models.layers.moe import Moe
from transom_worker.models.loading import Loader
from transom_worker.models.style import FeedForward, Style


def _feed_forward(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    """Build the MoE layer, or the dense MLP of a layer without experts."""
    mixture, hidden_size = architecture.mixture, architecture.hidden_size
    assert mixture is not None
    if index not in mixture.layers:
        return load.mlp(architecture.gate_activation, (hidden_size, mixture.dense_size), prefix="feed_forward.")
    load = load.under("feed_forward.")
    routing = Routing(num_chosen=mixture.num_chosen, score="sigmoid", normalise=False)
    router = ExpertRouter(
        load.tensor("router.weight", torch.float32, shape=(mixture.num_experts, hidden_size)), routing
    )
    experts = make_experts(
        experts_by_stack(load.under("experts."), mixture, hidden_size),
        GateRule(activation=architecture.gate_activation),
        quantization=load.quantization,
        scales_input=True,
    )
    sizes = (hidden_size, mixture.inner_size)
    shared = load.partial().mlp(architecture.gate_activation, sizes, prefix="shared_expert.")
    return Moe(router, experts, shared, comm=load.comm)


def query_scale(scale: PositionScale, positions_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factor [T] of the queries at these positions in NoPE layers."""
    return position_scale(positions_T, factor=scale.factor, interval=scale.interval, dtype=dtype)


def llama4(architecture: Architecture, load: Loader) -> Decoder:
    """Build the decoder of Llama 4."""
    scale = architecture.scales.query_by_position
    style = Style(
        qk_norm_after_rotation=architecture.norm_after_rotation,
        feed_forward=_feed_forward,
        query_scale=None if scale is None else partial(query_scale, scale),
    )
    return Decoder(architecture, load, style)
