"""The MoE families of the shared decoder, except Gemma 4. Each row names a family's differences from mixtral:

    mixtral         none here: all layers are MoE, with a softmax over the chosen experts
    qwen3_moe       QK norm of each head; some layers may be dense
    mimo_v2_flash   sigmoid scores, with a learned correction that only the choice of experts uses; sink logits in sliding-window
                    layers; values narrower than keys
    gpt_oss         a sink logit for each head; biases in router and experts; the experts' gate is
                    gate * sigmoid(1.702 * gate) * (up + 1), with `gate` and `up` clamped first
    llama4_text     chunked attention with RoPE, and every fourth layer global without RoPE (NoPE), both in `Architecture`; a shared
                    expert besides the routed ones; a routing weight (a sigmoid) multiplies the expert's input

Checkpoints hold an expert's matrices as separate tensors, but for gpt_oss and (unless quantised) llama4_text all experts in two
stacks. gpt_oss is published in MXFP4: the package `weights` gives it as bfloat16 tensors, or as MXFP4 if the device computes with
MXFP4.

Sources: the classes of these names in transformers (`models/<family>/modeling_<family>.py`); model cards of gpt-oss and Llama 4.

Legend: E experts, N hidden width.
"""

from __future__ import annotations

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.mixture import Mixture
from transom_kernels.moe import GateRule
from transom_kernels.route import Routing
from transom_worker.models.expert_loading import experts_by_name, experts_by_stack
from transom_worker.models.layers.experts import ExpertRouter, Moe, make_experts
from transom_worker.models.loading import Loader
from transom_worker.models.style import FeedForward, Style, dense_feed_forward


def _mixtral(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    return _routed(architecture, load.under("block_sparse_moe."), names=("w1", "w3", "w2"))


def _qwen3(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    return _routed_or_dense(architecture, index, load, corrected=False)


def _mimo(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    return _routed_or_dense(architecture, index, load, corrected=True)


def _routed_or_dense(architecture: Architecture, index: int, load: Loader, *, corrected: bool) -> FeedForward:
    """Build the MoE layer, or a dense MLP if the config excludes layer `index` from MoE."""
    if index not in _mixture(architecture).layers:
        return dense_feed_forward(architecture, index, load)
    names = ("gate_proj", "up_proj", "down_proj")
    return _routed(architecture, load.under("mlp."), names=names, corrected=corrected)


def _routed(
    architecture: Architecture, load: Loader, *, names: tuple[str, str, str], corrected: bool = False
) -> FeedForward:
    """Build an MoE layer. `names` are the checkpoint's names of an expert's gate, up and down matrices.

    `corrected`: the scores are sigmoids, and the router chooses the experts by score plus a learned correction.
    """
    mixture = _mixture(architecture)
    correction_E = load.tensor("gate.e_score_correction_bias", torch.float32) if corrected else None
    routing = Routing(
        num_chosen=mixture.num_chosen,
        score="sigmoid" if corrected else "softmax",
        normalise=mixture.normalise,
        scale=mixture.scale,
    )
    router = ExpertRouter(_gate(architecture, load, "gate"), routing, correction_E=correction_E)
    weights = experts_by_name(
        load, [f"experts.{{}}.{name}.weight" for name in names], mixture, architecture.hidden_size
    )
    experts = make_experts(weights, GateRule(activation=architecture.gate_activation), quantization=load.quantization)
    return Moe(router, experts, comm=load.comm)


def _gpt_oss(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    mixture, load = _mixture(architecture), load.under("mlp.")
    assert mixture.clamp is not None
    router = ExpertRouter(
        _gate(architecture, load, "router"),
        Routing(num_chosen=mixture.num_chosen),
        bias_E=load.tensor("router.bias", torch.float32, shape=(mixture.num_experts,)),
    )
    weights = experts_by_stack(load.under("experts."), mixture, architecture.hidden_size, interleaved=True, biased=True)
    rule = GateRule(limit=mixture.clamp, gain=mixture.gate_gain, up_offset=1.0)
    return Moe(router, make_experts(weights, rule, quantization=load.quantization), comm=load.comm)


def _llama4(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    """Build the MoE layer, or the dense MLP of a layer without experts."""
    mixture, hidden_size, activation = _mixture(architecture), architecture.hidden_size, architecture.gate_activation
    if index not in mixture.layers:
        return load.mlp(activation, (hidden_size, mixture.dense_size), prefix="feed_forward.")
    load = load.under("feed_forward.")
    routing = Routing(num_chosen=mixture.num_chosen, score="sigmoid", normalise=False)
    names = [f"experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")]
    # Tools that quantise make one matrix per expert of the stacks; `weights.names` may have the prefix of a multimodal model.
    first = load.prefix.removeprefix("model.") + names[0].format(0)
    is_split = any(name.endswith(first) for name in load.weights.names)
    weights = (
        experts_by_name(load, names, mixture, hidden_size)
        if is_split
        else experts_by_stack(load.under("experts."), mixture, hidden_size)
    )
    rule = GateRule(activation=activation)
    experts = make_experts(weights, rule, quantization=load.quantization, scales_input=True)
    shared = load.partial().mlp(activation, (hidden_size, mixture.inner_size), prefix="shared_expert.")
    return Moe(ExpertRouter(_gate(architecture, load, "router"), routing), experts, shared, comm=load.comm)


def _gate(architecture: Architecture, load: Loader, name: str) -> torch.Tensor:
    """Load the router's weight [E, N]."""
    shape = (_mixture(architecture).num_experts, architecture.hidden_size)
    return load.tensor(f"{name}.weight", torch.float32, shape=shape)


def _mixture(architecture: Architecture) -> Mixture:
    assert architecture.mixture is not None
    return architecture.mixture


MIXTURE_STYLES = {
    "mixtral": Style(feed_forward=_mixtral),
    "qwen3_moe": Style(qk_norm="each", feed_forward=_qwen3),
    "mimo_v2_flash": Style(sink_logits="attention_sink_bias", feed_forward=_mimo),
    "gpt_oss": Style(norm_wide=True, sink_logits="sinks", feed_forward=_gpt_oss),
    "llama4_text": Style(feed_forward=_llama4),
}
