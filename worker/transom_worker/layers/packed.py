"""oneDNN's packed bfloat16 weights, through torch's private operators.

torch's public operator packs the weight again in every call, which at few rows costs as much as the product itself. The packed
operators are private, so callers ask `available` first, and use torch's own linear layer without them.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

_ROWS_HINT = 32  # rows that the packed layout is chosen for; within noise of the best from 1 to 512

_POINTWISE = {"none": ("none", ""), "silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}  # oneDNN's names


class PackedWeight:
    """One packed weight and its bias."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _ROWS_HINT)
        self._bias_N = bias_N
        self._num_columns = weight_NK.shape[0]

    @staticmethod
    @cache
    def available() -> bool:
        """Whether this torch and this CPU have the packed operators, found by trying a tiny product."""
        try:
            weight = torch.ones(16, 16, dtype=torch.bfloat16)
            tiny = PackedWeight(weight, None)
            return bool((tiny.combine(weight, tiny.apply(weight, "silu"), "mul") > 0).all())
        except (AttributeError, RuntimeError, TypeError):
            return False

    def apply(self, x_MK: torch.Tensor, activation: Literal["none", "silu", "gelu_tanh"] = "none") -> torch.Tensor:
        """Return `activation(x @ weight.T + bias)`, [M, N]."""
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, self._num_columns)
        name, algorithm = _POINTWISE[activation]
        y_MN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, self._packed, self._bias_N, name, [], algorithm)
        return y_MN

    def combine(self, x_MK: torch.Tensor, other_MN: torch.Tensor, operation: Literal["add", "mul"]) -> torch.Tensor:
        """Return `(x @ weight.T + bias)` plus or times `other`, rounded once, [M, N]."""
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, self._num_columns)
        y_MN: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_MK, other_MN, self._packed, self._bias_N, operation
        )
        return y_MN
