"""A mixture-of-experts layer, which some models have instead of a dense feed-forward layer, and its router.

Legend: T tokens, N hidden width, E experts, K experts chosen per token.
"""

from __future__ import annotations

import torch

from transom_kernels.route import Routing, route, router_layout
from transom_worker.models.layers.experts import Experts
from transom_worker.models.layers.mlp import GatedMlp
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator


class ExpertRouter:
    """Scores the experts with a linear layer and chooses the best. It runs in float32, because scores may be close together."""

    def __init__(
        self,
        weight_EN: torch.Tensor,
        routing: Routing,
        *,
        bias_E: torch.Tensor | None = None,
        correction_E: torch.Tensor | None = None,
        expert_scale_E: torch.Tensor | None = None,
    ) -> None:
        """`correction_E` is added to the scores only to choose experts; `expert_scale_E` multiplies the chosen experts' weights."""
        self._weight_EN, self._bias_E = router_layout(weight_EN.float()), _float(bias_E)
        self._correction_E, self._expert_scale_E = _float(correction_E), _float(expert_scale_E)
        self._routing = routing
        tensors = (self._weight_EN, self._bias_E, self._correction_E, self._expert_scale_E)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every token's experts, int [T, K], and their weights, float32 [T, K].

        `chosen_TK`, if given, fixes the experts; only their weights are computed then.
        """
        return route(
            x_TN,
            self._weight_EN,
            self._routing,
            bias=self._bias_E,
            correction=self._correction_E,
            expert_scale=self._expert_scale_E,
            chosen=chosen_TK,
        )


class Moe:
    """Routed experts, and a shared expert that every token uses, if the model has one.

    With several ranks, each has a part of every expert's inner width; one all-reduce sums the ranks' partial outputs.
    """

    adds_in_product = False

    def __init__(
        self,
        router: ExpertRouter,
        experts: Experts,
        shared: GatedMlp | None = None,
        *,
        comm: Communicator = SINGLE_RANK,
    ) -> None:
        """`shared` must not all-reduce its own output, because this layer reduces the sum of all experts."""
        self._router, self._experts, self._shared, self._comm = router, experts, shared, comm
        parts = (router, experts) if shared is None else (router, experts, shared)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `moe(x)`, [T, N]."""
        routed_TN = self._experts(x_TN, *self._router(x_TN))
        return self._comm.all_reduce_(routed_TN if self._shared is None else self._shared.add_to(routed_TN, x_TN))

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + moe(x)`, [T, N]."""
        return residual_TN + self(x_TN)


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
