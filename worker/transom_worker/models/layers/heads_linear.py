"""A linear layer with a matrix of its own for each head: y[t, h] = weight[h] @ x[t, h].

Legend: T tokens, H heads, K input width, N output width.
"""

from __future__ import annotations

import torch

from transom_kernels.linear import heads_linear, pack_weight
from transom_worker.models.layers.linear import runs_packed


class HeadsLinear:
    """A matrix for each head, packed for the CPU kernels or as torch has it."""

    def __init__(self, weight_HNK: torch.Tensor) -> None:
        self._packed = [pack_weight(head_NK.contiguous()) for head_NK in weight_HNK] if runs_packed(weight_HNK) else []
        self._weight_HKN = None if self._packed else weight_HNK.transpose(1, 2).contiguous()
        self.weight_bytes = weight_HNK.nbytes

    def __call__(self, x_THK: torch.Tensor) -> torch.Tensor:
        """Return the products, [T, H, N], contiguous."""
        if self._weight_HKN is None:
            return heads_linear(x_THK, self._packed)
        return torch.bmm(x_THK.transpose(0, 1), self._weight_HKN).transpose(0, 1).contiguous()
