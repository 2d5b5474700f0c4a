"""The MoE families of the shared decoder, except Gemma 4: how feed-forward networks are loaded, and, at the end, their `Style`s.
docs/models.md says in words how each family differs from others.

The router's scores are a softmax over the chosen experts (mixtral) or over all, or sigmoids; a learned correction of them may
count for the choice of experts alone. In gpt_oss the experts' gate is gate * sigmoid(1.702 * gate) * (up + 1), with `gate` and `up`
clamped first; in llama4_text a routing weight, a sigmoid, multiplies the expert's input.

Checkpoints hold an expert's matrices as separate tensors, but for gpt_oss, granitemoe* and (unless quantised) llama4_text all
experts in two stacks, and for step3p5 in three. gpt_oss is published in MXFP4: the package `weights` gives it as bfloat16 tensors,
or as MXFP4 if the device computes with MXFP4.

Sources: the classes of these names in transformers (`models/<family>/modeling_<family>.py`); model cards of gpt-oss and Llama 4.

Legend: E experts, N hidden width.
"""

from dataclasses import replace
from functools import partial

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.mixture import Mixture
from transom_core.model_config.recurrent import DELTA_NET_FAMILIES
from transom_kernels.moe import GateRule
from transom_kernels.route import Routing, Score
from transom_worker.models.expert_loading import experts_by_name, experts_by_stack, experts_by_stack_or_name
from transom_worker.models.layers.experts import ExpertRouter, Moe, WeightedExpert, make_experts
from transom_worker.models.layers.linear import GatedMlp, Linear
from transom_worker.models.loading import Loader
from transom_worker.models.style import DENSE_STYLES, FeedForward, Style, dense_feed_forward


def _routed_or_dense(
    architecture: Architecture,
    index: int,
    load: Loader,
    *,
    prefix: str = "mlp.",
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    correction: str = "",
    score: Score = "softmax",
) -> FeedForward:
    """Build the MoE layer, or a dense MLP if the config excludes layer `index` from MoE or has no experts (Nemotron-H, Granite).

    `names` are the checkpoint's names of an expert's gate, if any, up and down matrices; without them, and in checkpoints that have
    such tensors, all experts are in two stacks. `correction` names a learned correction, which is added to the scores for the
    choice alone.
    """
    if architecture.mixture is None or index not in architecture.mixture.layers:
        return dense_feed_forward(architecture, index, load)
    mixture, load = architecture.mixture, load.under(prefix)
    names = names if architecture.has_gates else names[1:]
    shape = (1, mixture.num_experts) if architecture.family == "ernie4_5_moe" else (mixture.num_experts,)
    correction_E = load.tensor(correction, torch.float32, shape=shape).flatten() if correction else None
    routing = Routing(
        num_chosen=mixture.num_chosen,
        score=score,
        normalise=mixture.normalise,
        scale=mixture.scale,
        num_groups=mixture.num_groups,
        top_groups=mixture.top_groups,
    )
    router = ExpertRouter(_gate(architecture, load, "gate"), routing, correction_E=correction_E)
    width = mixture.latent_size or architecture.hidden_size
    # Qwen3-VL, which is a qwen3_moe in texts, is published with the input axis first; transformers may write it rows first.
    is_qwen = architecture.family == "qwen3_moe"
    weights = experts_by_stack_or_name(load, names, mixture, width, takes_input_first=is_qwen)
    rule = GateRule(activation=architecture.gate_activation, limits=dict(mixture.limits).get(index))
    experts = make_experts(weights, rule, quantization=load.quantization)
    return Moe(router, experts, _shared(architecture, index, load), latent=_latent(architecture, load), comm=load.comm)


def _latent(architecture: Architecture, load: Loader) -> tuple[Linear, Linear] | None:
    """Load the projections to the width of the experts and back, if that is not the hidden width. Each rank has all of both."""
    width, hidden, bias = _mixture(architecture).latent_size, architecture.hidden_size, architecture.mlp_bias
    if not width:
        return None
    into = load.linear("fc1_latent_proj", shapes=[(width, hidden)], bias=bias)
    columns = slice(0, width)
    return into, load.partial().row_parallel("fc2_latent_proj", shape=(hidden, width), columns=columns, bias=bias)


def _shared(architecture: Architecture, index: int, load: Loader) -> GatedMlp | WeightedExpert | None:
    """Load the expert that every token uses, if there is one. Qwen 2's is an expert with a router of its own, of one sigmoid."""
    mixture, hidden_size = _mixture(architecture), architecture.hidden_size
    if not mixture.shared_size:
        return None
    if architecture.family not in ("qwen2_moe", *DELTA_NET_FAMILIES):
        sizes = (hidden_size, mixture.shared_size)
        bias, limits = architecture.mlp_bias, dict(mixture.dense_limits).get(index)
        load, prefix = load.partial(), "shared_experts."
        return load.mlp(architecture.gate_activation, sizes, bias=bias, prefix=prefix, limits=limits)
    alone = replace(mixture, num_experts=1, inner_size=mixture.shared_size)
    names = [f"shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")]
    rule = GateRule(activation=architecture.gate_activation)
    expert = make_experts(experts_by_name(load, names, alone, hidden_size), rule, quantization=load.quantization)
    gate_1N = load.tensor("shared_expert_gate.weight", torch.float32, shape=(1, hidden_size))
    return WeightedExpert(ExpertRouter(gate_1N, Routing(num_chosen=1, score="sigmoid", normalise=False)), expert)


def _gpt_oss(architecture: Architecture, index: int, load: Loader) -> FeedForward:
    mixture, load = _mixture(architecture), load.under("mlp.")
    assert mixture.clamp is not None
    router = ExpertRouter(
        _gate(architecture, load, "router"),
        Routing(num_chosen=mixture.num_chosen),
        bias_E=load.tensor("router.bias", torch.float32, shape=(mixture.num_experts,)),
    )
    weights = experts_by_stack(load.under("experts."), mixture, architecture.hidden_size, interleaved=True, biased=True)
    rule = GateRule(limits=(mixture.clamp, mixture.clamp), gain=mixture.gate_gain, up_offset=1.0)
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
    shared = load.partial().mlp(activation, (hidden_size, mixture.shared_size), prefix="shared_expert.")
    return Moe(ExpertRouter(_gate(architecture, load, "router"), routing), experts, shared, comm=load.comm)


def _gate(architecture: Architecture, load: Loader, name: str) -> torch.Tensor:
    """Load the router's weight [E, N]."""
    shape = (_mixture(architecture).num_experts, architecture.hidden_size)
    return load.tensor(f"{name}.weight", torch.float32, shape=shape)


def _mixture(architecture: Architecture) -> Mixture:
    assert architecture.mixture is not None
    return architecture.mixture


_by_sigmoid = partial(_routed_or_dense, score="sigmoid")
_corrected = partial(_by_sigmoid, correction="gate.e_score_correction_bias")
_mixtral = partial(_routed_or_dense, prefix="block_sparse_moe.", names=("w1", "w3", "w2"))
_granite = partial(_mixtral, names=())
_lfm2 = partial(_mixtral, prefix="feed_forward.", score="sigmoid", correction="expert_bias")

MIXTURE_STYLES = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "solar_open", "bailing_hybrid"),
        Style(feed_forward=_corrected),
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), Style(feed_forward=_granite)),
    "granitemoe_swa": Style(sink_logits="sinks", feed_forward=_granite),
    "olmoe": Style(qk_norm="all", feed_forward=_routed_or_dense),
    "mellum": Style(qk_norm="each", feed_forward=_routed_or_dense),
    "exaone_moe": Style(qk_norm="each", feed_forward=partial(_by_sigmoid, correction="e_score_correction_bias")),
    "flint": Style(norm_wide=True, qk_norm="each", sink_logits="softmax_offset", feed_forward=_by_sigmoid),
    "ernie4_5_moe": Style(feed_forward=partial(_routed_or_dense, correction="moe_statics.e_score_correction_bias")),
    "hy_v3": Style(qk_norm="each", feed_forward=partial(_by_sigmoid, correction="expert_bias")),
    "afmoe": Style(
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp="pre_mlp_layernorm",
        norm_after_mlp="post_mlp_layernorm",
        norm_wide=True,
        qk_norm="each",
        output_gate="gate_proj",
        feed_forward=partial(_by_sigmoid, correction="expert_bias"),
    ),
    "mixtral": Style(feed_forward=_mixtral),
    "qwen2_moe": Style(feed_forward=_routed_or_dense),
    "qwen3_moe": Style(qk_norm="each", feed_forward=_routed_or_dense),
    "qwen3_next": replace(DENSE_STYLES["qwen3_5_text"], feed_forward=_routed_or_dense),
    "qwen3_5_moe_text": replace(DENSE_STYLES["qwen3_5_text"], feed_forward=_routed_or_dense),
    **dict.fromkeys(("glm4_moe", "dots1"), Style(qk_norm="each", feed_forward=_corrected)),
    "step3p5": Style(
        norm_plus_one=True, qk_norm="each", output_gate="g_proj", gates_heads=True, feed_forward=_corrected
    ),
    "minimax_m2": Style(
        qk_norm="all", feed_forward=partial(_mixtral, score="sigmoid", correction="e_score_correction_bias")
    ),
    **dict.fromkeys(("deepseek_v2", "mistral4"), Style(feed_forward=_routed_or_dense)),
    "kimi_linear": Style(feed_forward=partial(_mixtral, score="sigmoid", correction="gate.e_score_correction_bias")),
    "nemotron_h": Style(norm_wide=True, feed_forward=_corrected),
    "jamba": Style(feed_forward=_routed_or_dense),
    "lfm2_moe": replace(DENSE_STYLES["lfm2"], feed_forward=_lfm2),
    "mimo_v2_flash": Style(sink_logits="attention_sink_bias", feed_forward=_corrected),
    "gpt_oss": Style(norm_wide=True, sink_logits="sinks", feed_forward=_gpt_oss),
    "llama4_text": Style(feed_forward=_llama4),
}
