"""int8 weights with one scale per output column, on CPUs; activations are rounded to int8 with one scale per row.

oneDNN's packed product (AMX or VNNI) is private to torch, so it is tried first; without it torch's own integer product serves.
Rounding the activations stays in their own dtype: torch's mixed bfloat16 and float32 arithmetic is ten times as slow.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from functools import cache

import torch

_LEVELS = 127
_ACTIVATION_LEVELS = 126  # one short of the largest, because the scale itself may round up


class Int8Weight:
    """One quantised weight; symmetric, rounded to nearest."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        largest_N = weight_NK.abs().amax(dim=1).float().clamp_(min=1e-12)
        self._scale_N = largest_N / _LEVELS
        values_NK = (weight_NK.float() / self._scale_N[:, None]).round_().to(torch.int8)
        self._packs = packs_int8()
        self._values = torch.ops.onednn.qlinear_prepack(values_NK, None) if self._packs else values_NK
        self._zero_N = torch.zeros(len(values_NK), dtype=torch.int32)
        self._num_columns = len(values_NK)
        self.nbytes = values_NK.nbytes + self._scale_N.nbytes

    def apply(self, x_MK: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T`, [M, N] in x's dtype."""
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, self._num_columns)
        scale_M1 = x_MK.abs().amax(dim=1, keepdim=True).clamp_(min=1e-20).div_(_ACTIVATION_LEVELS)
        rounded_MK = x_MK.mul(scale_M1.reciprocal()).round_().to(torch.int8)
        if not self._packs:
            product_MN = torch._int_mm(rounded_MK, self._values.t()).float().mul_(self._scale_N)
            return product_MN.to(x_MK.dtype).mul_(scale_M1)
        return self._packed_product(rounded_MK, x_MK.dtype).mul_(scale_M1)

    def _packed_product(self, rounded_MK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        product_MN: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded_MK, 1.0, 0, self._values, self._scale_N, self._zero_N, None, 1.0, 0, dtype, "none", [], ""
        )
        return product_MN


@cache
def packs_int8() -> bool:
    """Whether this torch and this CPU have oneDNN's packed int8 product, tried on a tiny one."""
    try:
        ones = torch.ones(16, 16, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(ones, None)
        scale, zero = torch.ones(16), torch.zeros(16, dtype=torch.int32)
        product = torch.ops.onednn.qlinear_pointwise(
            ones, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return bool((product == 16).all())
    except (AttributeError, RuntimeError, TypeError):
        return False
