"""A mixture-of-experts layer, which some models have instead of a dense feed-forward layer.

Legend: T tokens, N hidden width, K experts chosen per token.
"""

from __future__ import annotations

import torch

from transom_worker.models.layers.expert_router import ExpertRouter
from transom_worker.models.layers.experts import Experts
from transom_worker.models.layers.mlp import GatedMlp
from transom_worker.models.parallel import SINGLE_RANK, Communicator


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

    def __call__(self, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> torch.Tensor:
        """Return `moe(x)`, [T, N]; `chosen_TK` fixes each token's experts."""
        routed_TN = self._experts(x_TN, self._router(x_TN, chosen_TK))
        return self._comm.all_reduce_(routed_TN if self._shared is None else self._shared.add_to(routed_TN, x_TN))

    def add_to(
        self, residual_TN: torch.Tensor, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `residual + moe(x)`, [T, N]."""
        return residual_TN + self(x_TN, chosen_TK)
