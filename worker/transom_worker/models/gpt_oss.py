"""gpt-oss (OpenAI): a sink logit for each head, a window in every other layer, experts with biases and a clamped gate.

The experts' gate is `gate * sigmoid(1.702 * gate) * (up + 1)`, with `gate` and `up` clamped first. Published checkpoints hold the
experts in MXFP4; the package `weights` gives them as bfloat16 tensors, or as MXFP4 if the device computes with MXFP4.

Sources: the model card of gpt-oss, transformers' `GptOssForCausalLM`.
"""

from __future__ import annotations

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.moe import GateRule
from transom_kernels.route import Routing
from transom_worker.models.decoder import Decoder
from transom_worker.models.expert_loading import experts_by_stack
from transom_worker.models.layers.expert_router import ExpertRouter
from transom_worker.models.layers.experts import make_experts
from transom_worker.models.layers.moe import Moe
from transom_worker.models.loading import Loader
from transom_worker.models.style import FeedForward, Style


def _feed_forward(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    """Build the MoE layer."""
    mixture, hidden_size = architecture.mixture, architecture.hidden_size
    assert mixture is not None
    assert mixture.clamp is not None
    load = load.under("mlp.")
    router = ExpertRouter(
        load.tensor("router.weight", torch.float32, shape=(mixture.num_experts, hidden_size)),
        Routing(num_chosen=mixture.num_chosen),
        bias_E=load.tensor("router.bias", torch.float32, shape=(mixture.num_experts,)),
    )
    weights = experts_by_stack(load.under("experts."), mixture, hidden_size, interleaved=True, biased=True)
    rule = GateRule(limit=mixture.clamp, gain=mixture.gate_gain, up_offset=1.0)
    return Moe(router, make_experts(weights, rule, quantization=load.quantization), comm=load.comm)


_STYLE = Style(norm_wide=True, sink_logits="sinks", feed_forward=_feed_forward)


def gpt_oss(architecture: Architecture, load: Loader) -> Decoder:
    """Build the decoder of gpt-oss."""
    return Decoder(architecture, load, _STYLE)
