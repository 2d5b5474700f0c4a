"""Gated feed-forward layer: down(activation(gate(x)) * up(x)).

Legend: T tokens, N hidden width, I inner width of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.gated_mlp import Activation, gated_activation
from transom_kernels.linear import PackedWeight, gated_linear, pack_weight
from transom_kernels.quantised_linear import PackedPanels, pack_gated
from transom_worker.models.layers.linear import Linear, make_linear, make_row_parallel, runs_packed
from transom_worker.models.layers.quantisation import Quantization, Weight, quantised_rows
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator


class GatedMlp:
    """A gated feed-forward layer. One projection computes gate and up; with packed weights, the same kernel also applies the
    activation and multiplies the two.
    """

    def __init__(
        self,
        weights: Sequence[Weight],  # gate [I, N], up [I, N], down [N, I]
        biases: Sequence[torch.Tensor | None] | None,
        *,
        quantization: Quantization,
        activation: Activation = "silu",
        comm: Communicator = SINGLE_RANK,
    ) -> None:
        """With several ranks, each has a part of the inner width. Only rank 0 passes a bias of the down projection, since the
        ranks' outputs are summed; the others pass None.
        """
        self._activation: Activation = activation
        gate_IN, up_IN, down_NI = weights
        gate_bias, up_bias, down_bias = biases or (None, None, None)
        self._gate_up = _gate_and_up((gate_IN, up_IN), (gate_bias, up_bias), quantization)
        gate_up = self._gate_up
        gate_up_bytes = gate_up.weight_bytes if isinstance(gate_up, Linear) else gate_up.nbytes
        self._down = make_row_parallel(down_NI, down_bias, quantization=quantization, comm=comm)
        self.weight_bytes = gate_up_bytes + self._down.weight_bytes

    @property
    def adds_in_product(self) -> bool:
        """Return whether `add_to` adds the residual within the layer's last matrix product."""
        return self._down.adds_in_product

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + mlp(x)`, [T, N]."""
        return self._down.add_to(residual_TN, self._inner(x_TN))

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `mlp(x)`, [T, N]."""
        return self._down(self._inner(x_TN))

    def _inner(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return activation(gate(x)) * up(x), [T, I]."""
        if isinstance(self._gate_up, Linear):
            return gated_activation(self._gate_up(x_TN), self._activation)
        return gated_linear(x_TN, self._gate_up, self._activation)


def _gate_and_up(
    weights: tuple[Weight, Weight], biases: tuple[torch.Tensor | None, torch.Tensor | None], quantization: Quantization
) -> PackedWeight | PackedPanels | Linear:
    """Return the two projections fused. Both weights must be plain tensors, or be stored in the same format."""
    gate_IN, up_IN = weights
    gate_bias, up_bias = biases
    both = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
    gate, up = (quantised_rows(weight, quantization) for weight in weights)
    if gate is not None and up is not None:
        return pack_gated(gate, up, both)
    assert isinstance(gate_IN, torch.Tensor)
    assert isinstance(up_IN, torch.Tensor)
    if runs_packed(gate_IN):
        return pack_weight(gate_IN, gate_bias, up=up_IN, up_bias=up_bias)
    return make_linear(
        torch.cat([gate_IN, up_IN]), None if both is None else torch.cat(both), quantization=quantization
    )
