"""The MoE families whose checkpoints hold each expert's matrices as separate tensors: Mixtral, Qwen3-MoE, MiMo-V2-Flash.

    mixtral         all layers MoE, softmax over the chosen experts
    qwen3_moe       QK norm of each head; some layers may be dense
    mimo_v2_flash   sigmoid scores, with a learned correction that only the choice of experts uses; sink logits in sliding-window
                    layers; values narrower than keys

Sources: the classes of these names in transformers (`models/<family>/modeling_<family>.py`).

Legend: E experts, N hidden width.
"""

from __future__ import annotations

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.moe import GateRule
from transom_kernels.route import Routing
from transom_worker.models.decoder import Decoder
from transom_worker.models.expert_loading import experts_by_name
from transom_worker.models.layers.expert_router import ExpertRouter
from transom_worker.models.layers.experts import make_experts
from transom_worker.models.layers.moe import Moe
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
    assert architecture.mixture is not None
    if index not in architecture.mixture.layers:
        return dense_feed_forward(architecture, index, load)
    names = ("gate_proj", "up_proj", "down_proj")
    return _routed(architecture, load.under("mlp."), names=names, corrected=corrected)


def _routed(
    architecture: Architecture, load: Loader, *, names: tuple[str, str, str], corrected: bool = False
) -> FeedForward:
    """Build an MoE layer. `names` are the checkpoint's names of an expert's gate, up and down matrices.

    `corrected`: the scores are sigmoids, and the router chooses the experts by score plus a learned correction.
    """
    mixture = architecture.mixture
    assert mixture is not None
    correction_E = load.tensor("gate.e_score_correction_bias", torch.float32) if corrected else None
    routing = Routing(
        num_chosen=mixture.num_chosen,
        score="sigmoid" if corrected else "softmax",
        normalise=mixture.normalise,
        scale=mixture.scale,
    )
    gate_EN = load.tensor("gate.weight", torch.float32, shape=(mixture.num_experts, architecture.hidden_size))
    router = ExpertRouter(gate_EN, routing, correction_E=correction_E)
    weights = experts_by_name(
        load, [f"experts.{{}}.{name}.weight" for name in names], mixture, architecture.hidden_size
    )
    experts = make_experts(weights, GateRule(activation=architecture.gate_activation), quantization=load.quantization)
    return Moe(router, experts, comm=load.comm)


_STYLES = {
    "mixtral": Style(feed_forward=_mixtral),
    "qwen3_moe": Style(qk_norm="each", feed_forward=_qwen3),
    "mimo_v2_flash": Style(sink_logits="attention_sink_bias", feed_forward=_mimo),
}
MIXTURE_FAMILIES = tuple(_STYLES)


def mixture_of_matrices(architecture: Architecture, load: Loader) -> Decoder:
    """Build the decoder of a model of one of MIXTURE_FAMILIES."""
    return Decoder(architecture, load, _STYLES[architecture.family])
