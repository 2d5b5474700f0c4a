"""Row-parallel linear layers: each rank has some columns of the weight [N, K], and an all-reduce sums the ranks' products.

A column-parallel layer needs no class of its own: each rank has some rows of the weight, which is a linear layer with fewer rows.

Legend: M rows, K input width of this rank, N output width.
"""

from __future__ import annotations

import torch

from transom_worker.models.layers.linear import Linear, make_linear
from transom_worker.models.layers.quantisation import Quantization, Weight
from transom_worker.models.parallel import SINGLE_RANK, Communicator


class RowParallelLinear(Linear):
    """`x @ weight.T + bias`, summed over the ranks. Only rank 0 has a bias.

    The residual is added after the sum. It may be far larger than the ranks' products, so adding it to one of them would round
    that product's low bits away.
    """

    def __init__(self, linear: Linear, comm: Communicator) -> None:
        self._linear, self._comm = linear, comm
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, [M, N]."""
        return self._comm.all_reduce_(self._linear(x_MK))

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [M, N]."""
        return self(x_MK).add_(residual_MN)


def make_row_parallel(
    weight_NK: Weight,
    bias_N: torch.Tensor | None = None,
    *,
    quantization: Quantization = "none",
    comm: Communicator = SINGLE_RANK,
) -> Linear:
    """Return the layer for this rank's columns of a weight. With `SINGLE_RANK` as `comm` it does not sum over the ranks; if there
    are several, the caller does.

    A weight is divided among ranks before it is quantised, so a rank's groups of columns begin at its first column.
    """
    linear = make_linear(weight_NK, bias_N, quantization=quantization)
    return linear if comm is SINGLE_RANK else RowParallelLinear(linear, comm)


def all_reduce_both(comm: Communicator, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over the ranks of two tensors of one shape, with one all-reduce."""
    if comm is SINGLE_RANK:
        return x, y
    both = comm.all_reduce_(torch.stack((x, y)))
    return both[0], both[1]
