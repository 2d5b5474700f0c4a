"""Linear layers whose products are parts of a sum: each rank has some columns of the weight.

A layer whose rows are shared out needs no class of its own: its weight is that of fewer rows.

Legend: M rows, K input width of this rank, N output width.
"""

from __future__ import annotations

import torch

from transom_worker.layers.linear import Linear, Quantization, make_linear
from transom_worker.parallel import SINGLE_RANK, Communicator


class RowParallelLinear(Linear):
    """`x @ weight.T + bias`, added up over the ranks; a bias is the first rank's alone.

    The residual comes after the sum: it may be far larger than the parts, and would round each of them.
    """

    def __init__(self, linear: Linear, comm: Communicator) -> None:
        self._linear, self._comm = linear, comm
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """[M, N]."""
        return self._comm.all_reduce_(self._linear(x_MK))

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """`residual + self(x)`, [M, N]."""
        return self(x_MK).add_(residual_MN)


def make_row_parallel(
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    quantization: Quantization = "none",
    comm: Communicator = SINGLE_RANK,
) -> Linear:
    """The layer for this rank's columns of a weight; `SINGLE_RANK`, as for one rank, leaves the sum to the caller.

    In int8 each rank rounds its weight's rows and its part of the input with scales of their own, which are finer than one for
    all.
    """
    linear = make_linear(weight_NK, bias_N, quantization=quantization)
    return linear if comm is SINGLE_RANK else RowParallelLinear(linear, comm)


def all_reduce_both(comm: Communicator, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over ranks of two tensors of one shape, in one exchange."""
    if comm is SINGLE_RANK:
        return x, y
    both = comm.all_reduce_(torch.stack((x, y)))
    return both[0], both[1]
