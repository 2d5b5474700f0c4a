"""Gemma 4's feed-forward network with experts: a dense MLP and routed experts in parallel, each with its own norms around it.

Legend: T tokens, N hidden width, E experts.
"""

from __future__ import annotations

import torch

from transom_core.model_config.architecture import Architecture
from transom_kernels.hyper_connections import hc_norm
from transom_kernels.moe import GateRule
from transom_kernels.route import Routing
from transom_worker.models.expert_loading import experts_by_rows
from transom_worker.models.layers.expert_router import ExpertRouter
from transom_worker.models.layers.experts import make_experts
from transom_worker.models.layers.parallel_linear import all_reduce_both
from transom_worker.models.loading import Loader
from transom_worker.models.style import dense_feed_forward


class DenseAndExperts:
    """`norm(mlp(norm(x))) + norm(experts(norm(x)))`. The router reads x / rms(x), without a norm weight."""

    adds_in_product = False

    def __init__(self, architecture: Architecture, index: int, load: Loader) -> None:
        """Load layer `index`; `load` reads names within the layer."""
        mixture, eps, hidden = architecture.mixture, architecture.rms_norm_eps, architecture.hidden_size
        assert mixture is not None
        experts = mixture.num_experts
        self._mlp = dense_feed_forward(architecture, index, load.partial())
        weights = experts_by_rows(load.under("experts."), mixture, hidden)
        rule = GateRule(activation=architecture.gate_activation)
        self._experts = make_experts(weights, rule, quantization=load.quantization)
        scale_N = load.tensor("router.scale", torch.float32, shape=(hidden,)) * hidden**-0.5
        weight_EN = load.tensor("router.proj.weight", torch.float32, shape=(experts, hidden)) * scale_N
        expert_scale_E = load.tensor("router.per_expert_scale", torch.float32, shape=(experts,))
        self._router = ExpertRouter(weight_EN, Routing(num_chosen=mixture.num_chosen), expert_scale_E=expert_scale_E)
        self._eps, self._comm = eps, load.comm
        self._before_mlp = load.norm("pre_feedforward_layernorm", eps, size=hidden, wide=True)
        self._after_mlp = load.norm("post_feedforward_layernorm_1", eps, size=hidden, wide=True)
        self._before_experts = load.norm("pre_feedforward_layernorm_2", eps, size=hidden, wide=True)
        self._after_experts = load.norm("post_feedforward_layernorm_2", eps, size=hidden, wide=True)
        norms = (self._before_mlp, self._after_mlp, self._before_experts, self._after_experts)
        self.weight_bytes = sum(part.weight_bytes for part in (self._mlp, self._experts, self._router, *norms))

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the output [T, N] of `x` [T, N]."""
        dense_TN = self._mlp(self._before_mlp(x_TN))
        direction_TN = hc_norm(x_TN[:, None], self._eps)  # x / rms(x) in float32, the router's number format
        routed_TN = self._experts(self._before_experts(x_TN), self._router(direction_TN))
        dense_TN, routed_TN = all_reduce_both(self._comm, dense_TN, routed_TN)
        return self._after_mlp.add_to(self._after_experts(routed_TN), dense_TN)

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [T, N]."""
        return residual_TN + self(x_TN)
