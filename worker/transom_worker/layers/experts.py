"""Expert feed-forward layers: each runs once over the tokens that chose it.

Where several ranks share the inner width of every expert, what comes out is a part of a sum, which the caller adds up.

Legend: T tokens, N hidden width, I inner width of this rank, E experts, K experts chosen per token, P = T K pairs of token
and expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from transom_kernels.gated_mlp import gated_activation
from transom_kernels.launch import uses_triton
from transom_kernels.moe import ExpertTensors, GateRule, MxTensor, moe
from transom_worker.layers.expert_router import Routes
from transom_worker.layers.linear import Linear, Quantization, make_linear


class Experts(ABC):
    """The experts of a layer. `weight_bytes` is what they hold."""

    weight_bytes: int

    @abstractmethod
    def __call__(self, x_TN: torch.Tensor, routes: Routes) -> torch.Tensor:
        """What each token's experts make of it, added up, [T, N]."""


def make_experts(
    weights: ExpertTensors, rule: GateRule, *, quantization: Quantization, scales_input: bool = False
) -> Experts:
    """The fastest experts for these weights' device and dtype.

    `scales_input`: a route's weight multiplies what goes into the expert, not what comes out.
    """
    if isinstance(weights.down, MxTensor) or runs_grouped(weights.down, quantization):
        return GroupedExperts(weights, rule, scales_input=scales_input)
    return SequentialExperts(weights, rule, quantization=quantization, scales_input=scales_input)


def runs_grouped(like: torch.Tensor, quantization: Quantization) -> bool:
    """Whether experts beside this tensor run as grouped products, which take MXFP4 as stored."""
    return quantization == "none" and uses_triton(like)


class GroupedExperts(Experts):
    """All experts in two products, whose rows are found on the device: nothing waits for a count."""

    def __init__(self, weights: ExpertTensors, rule: GateRule, *, scales_input: bool) -> None:
        self._weights = ExpertTensors(
            gate_up=_in_one_piece(weights.gate_up),
            down=_in_one_piece(weights.down),
            gate_up_bias=weights.gate_up_bias,
            down_bias=weights.down_bias,
            interleaved=weights.interleaved,
        )
        self._rule, self._scales_input = rule, scales_input
        parts = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
        self.weight_bytes = sum(_bytes(part) for part in parts if part is not None)

    def __call__(self, x_TN: torch.Tensor, routes: Routes) -> torch.Tensor:
        """See `Experts`; a token's experts are added up in the order in which it chose them."""
        x_TN = x_TN.contiguous()
        return moe(
            x_TN, routes.experts_TK, routes.weights_TK, self._weights, self._rule, scales_input=self._scales_input
        )


class SequentialExperts(Experts):
    """Each expert runs once over the tokens that chose it, as many as the host counts.

    Weights that need no packing stay views of the stacked tensors. What comes out for a token does not depend on the other
    tokens beyond the rounding of a product with more rows: its experts are added up in the order in which it chose them.
    """

    def __init__(
        self, weights: ExpertTensors, rule: GateRule, *, quantization: Quantization, scales_input: bool
    ) -> None:
        """Plain weights, gates before ups."""
        assert isinstance(weights.gate_up, torch.Tensor)
        assert isinstance(weights.down, torch.Tensor)
        assert not weights.interleaved

        def linears(stacked: torch.Tensor, biases: torch.Tensor | None) -> list[Linear]:
            each = [None] * len(stacked) if biases is None else biases.unbind()
            return [
                make_linear(weight, bias, quantization=quantization)
                for weight, bias in zip(stacked.unbind(), each, strict=True)
            ]

        self._gate_up = linears(weights.gate_up, weights.gate_up_bias)
        self._down = linears(weights.down, weights.down_bias)
        self._rule, self._scales_input = rule, scales_input
        self.weight_bytes = sum(linear.weight_bytes for linear in (*self._gate_up, *self._down))

    def __call__(self, x_TN: torch.Tensor, routes: Routes) -> torch.Tensor:
        """See `Experts`."""
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
                y_PN[rows] = down(apply_gate(gate_up(x_PN[rows]), self._rule))
                start += count
        return y_PN


def apply_gate(gate_up: torch.Tensor, rule: GateRule) -> torch.Tensor:
    """Gates [P, I], then ups, of `gate_up` [P, 2I], joined as `rule` says, [P, I]."""
    is_plain = rule.gain == 1.0 and rule.up_offset == 0.0
    if is_plain and (rule.limit is None or uses_triton(gate_up)):
        return gated_activation(gate_up, rule.activation, rule.limit)
    gate, up = gate_up.chunk(2, dim=-1)
    if rule.limit is not None:
        gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    return gate * torch.sigmoid(gate * rule.gain) * (up + rule.up_offset)


def _in_one_piece(weight: torch.Tensor | MxTensor) -> torch.Tensor | MxTensor:
    if isinstance(weight, MxTensor):
        return MxTensor(blocks=weight.blocks.contiguous(), scales=weight.scales.contiguous())
    return weight.contiguous()


def _bytes(weight: torch.Tensor | MxTensor) -> int:
    if isinstance(weight, MxTensor):
        return weight.blocks.nbytes + weight.scales.nbytes
    return weight.nbytes
