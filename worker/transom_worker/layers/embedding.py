"""Token embedding and the head that turns hidden rows into logits, which may share their weight.

Legend: T tokens, R rows whose logits are wanted, V vocabulary, N hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_worker.layers.linear import PlainLinear, Quantization, make_linear


class Embedding:
    """Rows of a table."""

    def __init__(self, weight_VN: torch.Tensor) -> None:
        self.weight_VN = weight_VN
        self.weight_bytes = weight_VN.nbytes

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return F.embedding(token_ids_T, self.weight_VN)


class Head:
    """Logits in float32.

    A tied head on a GPU or in float32 on a CPU uses the embedding's own tensor; a packed or quantised one is a second copy,
    because a table that rows are looked up in cannot be packed.
    """

    def __init__(self, weight_VN: torch.Tensor, *, quantization: Quantization, tied: bool) -> None:
        self._linear = make_linear(weight_VN, quantization=quantization)
        shares = tied and isinstance(self._linear, PlainLinear)
        self.weight_bytes = 0 if shares else self._linear.weight_bytes

    def __call__(self, x_RN: torch.Tensor) -> torch.Tensor:
        """[R, V] float32."""
        return self._linear(x_RN).float()
