"""int8 weights with one scale per output column, on CPUs.

At few rows the activations stay as they are and the product reads half the bytes; from `_FEW_ROWS` on they are rounded to int8
too, with one scale per row, and the product runs in integers.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

import torch

_FEW_ROWS = 4
_LEVELS = 127


class Int8Weight:
    """One quantised weight; symmetric, rounded to nearest."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        largest_N = weight_NK.abs().amax(dim=1).float().clamp_(min=1e-12)
        self._scale_N = largest_N / _LEVELS
        self._values_NK = (weight_NK.float() / self._scale_N[:, None]).round_().to(torch.int8)
        self._scale_low_N = self._scale_N.to(torch.bfloat16)
        self.nbytes = self._values_NK.nbytes + self._scale_N.nbytes + self._scale_low_N.nbytes

    def apply(self, x_MK: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T`, [M, N] in x's dtype."""
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, self._values_NK.shape[0])
        if x_MK.shape[0] <= _FEW_ROWS and x_MK.dtype == torch.bfloat16:
            return torch._weight_int8pack_mm(x_MK.contiguous(), self._values_NK, self._scale_low_N)
        return self._in_integers(x_MK)

    def _in_integers(self, x_MK: torch.Tensor) -> torch.Tensor:
        scale_M1 = x_MK.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-12).div_(_LEVELS)
        rounded_MK = (x_MK / scale_M1).round_().to(torch.int8)
        product_MN = torch._int_mm(rounded_MK, self._values_NK.t())
        return (product_MN * (scale_M1 * self._scale_N)).to(x_MK.dtype)
