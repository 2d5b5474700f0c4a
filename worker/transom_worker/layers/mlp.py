"""Gated feed-forward layer: down(activation(gate(x)) * up(x)).

Legend: T tokens, N hidden width, I inner width of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.gated_mlp import Activation, gated_activation
from transom_worker.layers.linear import PackedLinear, Quantization, make_linear, runs_packed
from transom_worker.layers.parallel_linear import make_row_parallel
from transom_worker.parallel import SINGLE_RANK, Communicator


class GatedMlp:
    """A gated feed-forward layer.

    Packed weights run gate and up as two projections, which apply the activation and the product themselves. Other weights run
    one fused projection for both.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],  # gate [I, N], up [I, N], down [N, I]
        biases: Sequence[torch.Tensor | None] | None,
        *,
        quantization: Quantization,
        activation: Activation = "silu",
        comm: Communicator = SINGLE_RANK,
    ) -> None:
        """With several ranks, each has a part of the inner width. Only rank 0 passes the bias of the down projection; other
        ranks pass None.
        """
        self._activation: Activation = activation
        gate_IN, up_IN, down_NI = weights
        gate_bias, up_bias, down_bias = biases or (None, None, None)
        self._pair: tuple[PackedLinear, PackedLinear] | None = None
        if runs_packed(gate_IN, quantization):
            self._pair = (PackedLinear(gate_IN, gate_bias), PackedLinear(up_IN, up_bias))
        else:
            bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
            self._gate_up = make_linear(torch.cat([gate_IN, up_IN]), bias, quantization=quantization)
        self._down = make_row_parallel(down_NI, down_bias, quantization=quantization, comm=comm)
        layers = (*(self._pair or (self._gate_up,)), self._down)
        self.weight_bytes = sum(layer.weight_bytes for layer in layers)

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + mlp(x)`, [T, N]."""
        return self._down.add_to(residual_TN, self._inner(x_TN))

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `mlp(x)`, [T, N]."""
        return self._down(self._inner(x_TN))

    def _inner(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return activation(gate(x)) * up(x), [T, I]."""
        if self._pair is None:
            return gated_activation(self._gate_up(x_TN), self._activation)
        gate, up = self._pair
        return up.packed.combine(x_TN, gate.packed.apply(x_TN, self._activation), "mul")
