"""The router of a mixture of experts: chooses each token's experts and the weight of each.

Legend: T tokens, N hidden width, E experts, K experts chosen per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.route import Routing, route, router_layout


@dataclass(frozen=True, slots=True)
class Routes:
    """Every token's experts, int [T, K], and their weights, float32 [T, K]."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor


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

    def __call__(self, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> Routes:
        """Return the routes of these tokens. `chosen_TK`, if given, fixes the experts; only their weights are computed then."""
        experts_TK, weights_TK = route(
            x_TN,
            self._weight_EN,
            self._routing,
            bias=self._bias_E,
            correction=self._correction_E,
            expert_scale=self._expert_scale_E,
            chosen=chosen_TK,
        )
        return Routes(experts_TK, weights_TK)


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
