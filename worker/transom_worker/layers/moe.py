"""A mixture of experts in the place of a feed-forward layer.

Legend: T tokens, N hidden width, K experts chosen per token.
"""

from __future__ import annotations

import torch

from transom_worker.layers.experts import Experts
from transom_worker.layers.mlp import GatedMlp
from transom_worker.layers.router import Router


class Moe:
    """Routed experts, and one that every token passes through where the model has it."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMlp | None = None) -> None:
        self._router, self._experts, self._shared = router, experts, shared
        parts = (router, experts) if shared is None else (router, experts, shared)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> torch.Tensor:
        """`moe(x)`, [T, N]; `chosen_TK` fixes each token's experts."""
        routed_TN = self._experts(x_TN, self._router(x_TN, chosen_TK))
        return routed_TN if self._shared is None else self._shared.add_to(routed_TN, x_TN)

    def add_to(
        self, residual_TN: torch.Tensor, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`residual + moe(x)`, [T, N]."""
        return residual_TN + self(x_TN, chosen_TK)
