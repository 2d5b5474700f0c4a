"""Expert feed-forward layers: each runs once over the tokens that chose it.

Where several ranks share the inner width of every expert, what comes out is a part of a sum, which the caller adds up.

Legend: T tokens, N hidden width, I inner width of this rank, E experts, K experts chosen per token, P = T K pairs of token
and expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from transom_worker.layers.linear import Linear, Quantization, make_linear
from transom_worker.layers.router import Routes

Activation = Callable[[torch.Tensor], torch.Tensor]  # [P, 2I], gates then ups, to [P, I]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """All experts of a layer, stacked; gates before ups."""

    gate_up: torch.Tensor  # [E, 2I, N]
    down: torch.Tensor  # [E, N, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2I]
    down_bias: torch.Tensor | None = None  # [E, N]; of several ranks the first one's alone


class Experts:
    """The experts of a layer.

    Weights that need no packing stay views of the stacked tensors. What comes out for a token does not depend on the other
    tokens beyond the rounding of a product with more rows: its experts are added up in the order in which it chose them.
    """

    def __init__(
        self, weights: ExpertWeights, activation: Activation, *, quantization: Quantization, scales_input: bool = False
    ) -> None:
        """`scales_input`: a route's weight multiplies what goes into the expert, not what comes out."""

        def linears(stacked: torch.Tensor, biases: torch.Tensor | None) -> list[Linear]:
            each = [None] * len(stacked) if biases is None else biases.unbind()
            return [
                make_linear(weight, bias, quantization=quantization)
                for weight, bias in zip(stacked.unbind(), each, strict=True)
            ]

        self._gate_up = linears(weights.gate_up, weights.gate_up_bias)
        self._down = linears(weights.down, weights.down_bias)
        self._activation, self._scales_input = activation, scales_input
        self.weight_bytes = sum(linear.weight_bytes for linear in (*self._gate_up, *self._down))

    def __call__(self, x_TN: torch.Tensor, routes: Routes) -> torch.Tensor:
        """What each token's experts make of it, added up, [T, N]."""
        chosen_P, num_chosen = routes.experts_TK.flatten(), routes.experts_TK.shape[1]
        order_P = chosen_P.argsort(stable=True)  # by expert, then by token
        x_PN = x_TN.index_select(0, order_P // num_chosen)
        if self._scales_input:
            x_PN = (x_PN.float() * routes.weights_TK.flatten()[order_P, None]).to(x_TN.dtype)
        y_PN = torch.empty_like(x_PN)
        y_PN[order_P] = self._apply(x_PN, torch.bincount(chosen_P, minlength=len(self._down)).tolist())
        y_TKN = y_PN.view(*routes.experts_TK.shape, x_TN.shape[1]).float()
        if self._scales_input:
            return y_TKN.sum(dim=1).to(x_TN.dtype)
        return torch.bmm(routes.weights_TK[:, None], y_TKN).squeeze(1).to(x_TN.dtype)

    def _apply(self, x_PN: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Every expert over its rows of `x_PN`, `counts` for each, [P, N]."""
        y_PN = torch.empty_like(x_PN)
        start = 0
        for gate_up, down, count in zip(self._gate_up, self._down, counts, strict=True):
            if count:
                rows = slice(start, start + count)
                y_PN[rows] = down(self._activation(gate_up(x_PN[rows])))
                start += count
        return y_PN


def clamped_swiglu(gate_up: torch.Tensor, *, limit: float, alpha: float = 1.0, up_offset: float = 0.0) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, the gate kept below `limit` and the up within it, [P, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + up_offset)
