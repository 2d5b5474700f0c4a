"""A mixture-of-experts layer, which some models have instead of a dense feed-forward layer: its router, and its experts, each a
feed-forward layer for the tokens that are routed to it.

With several ranks, each rank has a part of every expert's inner width. A rank's output is then a partial sum, and the caller adds
the partial sums of all ranks.

Legend: T tokens, N hidden width, I inner width of this rank, E experts, K experts chosen per token, P = T K pairs of token and
expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.gated_mlp import gated_activation
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.moe import ExpertTensors, GateRule, MxTensor, PackedExperts, for_gpu, moe, pack_experts
from transom_kernels.moe.gpu_weights import arranged
from transom_kernels.moe.op import gated
from transom_kernels.moe.weights import GpuMatrix, Matrix
from transom_kernels.quantised_linear import GpuRows, StoredRows
from transom_kernels.rms_norm import rms_norm
from transom_kernels.route import Routing, route, router_layout
from transom_worker.models.layers.linear import GatedMlp, Linear, make_linear
from transom_worker.models.layers.quantisation import Quantization, Weight
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The weights of all experts of a layer in 8 or 4 bits, as a checkpoint stores them: gates, if any, above ups, and downs."""

    gate_up: Sequence[StoredRows]  # of each expert [2 I, N] or [I, N]
    down: Sequence[StoredRows]  # [N, I]


class Experts(ABC):
    """The experts of one layer. `weight_bytes` is the size of their weights."""

    weight_bytes: int

    @abstractmethod
    def __call__(self, x_TN: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, N]; `experts_TK` and `weights_TK` come from a router."""


def make_experts(
    weights: ExpertTensors | StoredExperts, rule: GateRule, *, quantization: Quantization, scales_input: bool = False
) -> Experts:
    """Return the fastest implementation for the device and dtype of these weights.

    With `scales_input`, a route's weight multiplies the expert's input; otherwise it multiplies the expert's output.
    """
    if isinstance(weights, StoredExperts) and isinstance(weights.down[0], GpuRows):
        return GroupedExperts(_for_gpu(weights, rule), rule, scales_input=scales_input)
    if isinstance(weights, StoredExperts):
        return SequentialExperts(
            weights.gate_up, weights.down, rule, quantization=quantization, scales_input=scales_input
        )
    if not isinstance(weights.down, torch.Tensor) or runs_grouped(weights.down, quantization):
        return GroupedExperts(weights, rule, scales_input=scales_input)
    assert isinstance(weights.gate_up, torch.Tensor)
    assert not weights.interleaved
    return SequentialExperts(
        weights.gate_up.unbind(),
        weights.down.unbind(),
        rule,
        biases=(weights.gate_up_bias, weights.down_bias),
        quantization=quantization,
        scales_input=scales_input,
    )


def runs_grouped(like: torch.Tensor, quantization: Quantization) -> bool:
    """Return whether experts with the device and dtype of `like` run as grouped matrix products, which take MXFP4 as stored."""
    if quantization != "none":
        return False
    if like.is_meta:  # memory is planned; both kinds of kernels run experts so
        return True
    return uses_triton(like) or (like.dtype in (torch.bfloat16, torch.float32) and uses_cpu_kernels(like))


class GroupedExperts(Experts):
    """Runs all experts in two grouped matrix products. The device finds each expert's rows, so the host never waits for counts.

    Weights are packed into the layout of the device's kernels, and the original tensors are not kept; on GPUs only MXFP4 is.
    """

    def __init__(self, weights: ExpertTensors, rule: GateRule, *, scales_input: bool) -> None:
        self._rule, self._scales_input = rule, scales_input
        self._weights: ExpertTensors | PackedExperts
        parts = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
        # The padding of packed weights is not counted.
        self.weight_bytes = sum(_bytes(part) for part in parts if part is not None)
        like = weights.down.blocks if isinstance(weights.down, MxTensor) else weights.down
        like = like.words if isinstance(like, GpuMatrix) else like
        if uses_cpu_kernels(like):
            self._weights = pack_experts(weights)
            return
        if uses_triton(like):
            weights = for_gpu(weights)
        self._weights = replace(weights, gate_up=_contiguous(weights.gate_up), down=_contiguous(weights.down))

    def __call__(self, x_TN: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, added in the order in which the token chose them, [T, N]."""
        x_TN = x_TN.contiguous()
        return moe(x_TN, experts_TK, weights_TK, self._weights, self._rule, scales_input=self._scales_input)


class SequentialExperts(Experts):
    """Runs one expert after the other over its tokens; the host reads how many tokens each expert has.

    Weights that need no packing stay views of the stacked tensors. A token's experts are added in the order in which the token
    chose them. So other tokens can change its result only by how a matrix product with more rows rounds.
    """

    def __init__(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        rule: GateRule,
        *,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        quantization: Quantization,
        scales_input: bool,
    ) -> None:
        """The weights are those of each expert, with all gates, if any, before all ups; `biases` are stacks of all experts'."""

        def linears(weights: Sequence[Weight], stacked: torch.Tensor | None) -> list[Linear]:
            each = [None] * len(weights) if stacked is None else stacked.unbind()
            return [
                make_linear(weight, bias, quantization=quantization) for weight, bias in zip(weights, each, strict=True)
            ]

        self._gate_up, self._down = linears(gate_up, biases[0]), linears(down, biases[1])
        self._rule, self._scales_input = rule, scales_input
        self.weight_bytes = sum(linear.weight_bytes for linear in (*self._gate_up, *self._down))

    def __call__(self, x_TN: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, N]."""
        chosen_P, num_chosen = experts_TK.flatten(), experts_TK.shape[1]
        order_P = chosen_P.argsort(stable=True)  # by expert, then by token
        x_PN = x_TN.index_select(0, order_P // num_chosen)
        if self._scales_input:
            x_PN = (x_PN.float() * weights_TK.flatten()[order_P, None]).to(x_TN.dtype)
        y_PN = torch.empty_like(x_PN)
        refuse_recording("experts in torch read the number of tokens of each expert in Python")
        y_PN[order_P] = self._apply(x_PN, torch.bincount(chosen_P, minlength=len(self._down)).tolist())
        y_TKN = y_PN.view(*experts_TK.shape, x_TN.shape[1]).float()
        if self._scales_input:
            return y_TKN.sum(dim=1).to(x_TN.dtype)
        return torch.bmm(weights_TK[:, None], y_TKN).squeeze(1).to(x_TN.dtype)

    def _apply(self, x_PN: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return every expert's output for its rows of `x_PN`, [P, N]; `counts` has the number of rows of each expert."""
        y_PN = torch.empty_like(x_PN)
        start = 0
        for gate_up, down, count in zip(self._gate_up, self._down, counts, strict=True):
            if count:
                rows = slice(start, start + count)
                y_PN[rows] = down(apply_gate(gate_up(x_PN[rows]), self._rule))
                start += count
        return y_PN


def apply_gate(gate_up: torch.Tensor, rule: GateRule) -> torch.Tensor:
    """Return the activation [P, I] of `gate_up` [P, 2I], gates before ups, or of ups [P, I]; `rule` has the formula."""
    if rule.gain == 1.0 and rule.up_offset == 0.0:
        return gated_activation(gate_up, rule.activation, rule.limits)
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, rule)


def _for_gpu(weights: StoredExperts, rule: GateRule) -> ExpertTensors:
    """Return experts as the grouped kernels hold them, with alternating gates and ups, or ups alone."""
    kinds = 2 if rule.has_gates else 1
    gate_up, down = (
        arranged(part for part in parts if isinstance(part, GpuRows))
        for parts in (
            [
                part.map_rows(lambda tensor: tensor.view(kinds, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1))
                for part in weights.gate_up
            ],
            weights.down,
        )
    )
    return ExpertTensors(gate_up=gate_up, down=down, interleaved=True)


def _contiguous(weight: Matrix) -> Matrix:
    return weight.contiguous() if isinstance(weight, torch.Tensor) else weight


def _bytes(weight: Matrix) -> int:
    if isinstance(weight, MxTensor):
        return weight.blocks.nbytes + weight.scales.nbytes
    return weight.nbytes


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
        self._launches: dict[Any, Any] = {}
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
            launches=self._launches,
        )


class WeightedExpert:
    """An expert that every token uses with a weight of its own: the router is of this expert alone."""

    def __init__(self, router: ExpertRouter, expert: Experts) -> None:
        self._router, self._expert = router, expert
        self.weight_bytes = router.weight_bytes + expert.weight_bytes

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + weight(x) * expert(x)`, [T, N]."""
        # Without weights this is a sum and no norm; unlike torch's, it is recorded as a kernel.
        return rms_norm(self._expert(x_TN, *self._router(x_TN)), None, 0.0, residual_TN)[1]


class Moe:
    """Routed experts, and a shared expert that every token uses, if the model has one.

    With several ranks, each has a part of every expert's inner width; one all-reduce sums the ranks' partial outputs.
    """

    adds_in_product = False

    def __init__(
        self,
        router: ExpertRouter,
        experts: Experts,
        shared: GatedMlp | WeightedExpert | None = None,
        *,
        latent: tuple[Linear, Linear] | None = None,
        comm: Communicator = SINGLE_RANK,
    ) -> None:
        """`shared` must not all-reduce its own output, because this layer reduces the sum of all experts. `latent` are projections
        to the width of the routed experts and back; the latter, too, is of each rank's partial sum."""
        self._router, self._experts, self._shared, self._comm = router, experts, shared, comm
        self._latent = latent
        parts = (router, experts, shared, *(latent or ()))
        self.weight_bytes = sum(part.weight_bytes for part in parts if part is not None)

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `moe(x)`, [T, N]."""
        if self._latent is None:
            routed_TN = self._experts(x_TN, *self._router(x_TN))
        else:
            into, back = self._latent
            routed_TN = back(self._experts(into(x_TN), *self._router(x_TN)))
        return self._comm.all_reduce_(routed_TN if self._shared is None else self._shared.add_to(routed_TN, x_TN))

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + moe(x)`, [T, N]."""
        return residual_TN + self(x_TN)


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
