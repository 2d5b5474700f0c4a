"""Which experts each token goes to, and how much each of them counts.

Legend: T tokens, N hidden width, E experts, K experts chosen per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]

_TINY = 1e-20  # keeps a sum of scores that all rounded to zero from dividing by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router's logits become choices and weights.

    A learned correction is added to the scores for the choice alone. `normalise` makes a token's weights add up to `scale`.
    """

    num_chosen: int
    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Routes:
    """Every token's experts, and their weights in float32."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor


class Router:
    """A linear layer in float32 (two experts may be close together) and a choice."""

    def __init__(
        self,
        weight_EN: torch.Tensor,
        routing: Routing,
        *,
        bias_E: torch.Tensor | None = None,
        correction_E: torch.Tensor | None = None,
    ) -> None:
        self._weight_EN, self._bias_E, self._correction_E = weight_EN.float(), _float(bias_E), _float(correction_E)
        self._routing = routing
        tensors = (self._weight_EN, self._bias_E, self._correction_E)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x_TN: torch.Tensor, chosen_TK: torch.Tensor | None = None) -> Routes:
        """The routes of these tokens; `chosen_TK` fixes the experts, so that only the weights are learned."""
        logits_TE = F.linear(x_TN.float(), self._weight_EN, self._bias_E)
        return route(logits_TE, self._routing, correction_E=self._correction_E, chosen_TK=chosen_TK)


def route(
    logits_TE: torch.Tensor,
    routing: Routing,
    *,
    correction_E: torch.Tensor | None = None,
    chosen_TK: torch.Tensor | None = None,
) -> Routes:
    """Choices and weights of a router's logits.

    A softmax over the chosen logits alone is the softmax over all of them, normalised: it needs no form of its own.
    """
    scores_TE = _scores(logits_TE, routing.score)
    if chosen_TK is None:
        preference_TE = scores_TE if correction_E is None else scores_TE + correction_E
        chosen_TK = preference_TE.topk(routing.num_chosen, dim=-1).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    if routing.normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _TINY)
    return Routes(chosen_TK, weights_TK * routing.scale)


def _scores(logits_TE: torch.Tensor, score: Score) -> torch.Tensor:
    match score:
        case "softmax":
            return logits_TE.softmax(dim=-1)
        case "sigmoid":
            return logits_TE.sigmoid()
        case "sqrt_softplus":
            return F.softplus(logits_TE).sqrt()


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
