"""int8 linear layers for CPUs: weights with one scale per output column, activations rounded to int8 with one scale per row.

The integer product has three implementations, and `best_product` takes the first that is exact on this processor:

- *packed*: oneDNN's product over weights in its own layout (AMX or VNNI instructions); private to torch, so it is tried first;
- *integer*: torch's public integer product;
- *float*: the same integers multiplied in float32. It is slower, and the only exact one on processors without VNNI: their integer
  products add pairs of 8-bit products in 16 bits and saturate.

Activations are rounded in their own dtype, since torch's mixed bfloat16 and float32 arithmetic is ten times as slow.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F

Product = Literal["packed", "integer", "float"]

_LEVELS = 127
_ACTIVATION_LEVELS = 126  # one short of the largest, because the scale itself may round up
_PROBE_WIDTH = 64


class Int8Weight:
    """One quantised weight: symmetric, rounded to the nearest level."""

    def __init__(self, weight_NK: torch.Tensor, product: Product | None = None) -> None:
        """`product` replaces the best product of this processor."""
        largest_N = weight_NK.abs().amax(dim=1).float().clamp_(min=1e-12)
        self._scale_N = largest_N / _LEVELS
        values_NK = (weight_NK.float() / self._scale_N[:, None]).round_().to(torch.int8)
        self._product = product or best_product()
        self._values = _prepack(values_NK) if self._product == "packed" else values_NK
        self._zero_N = torch.zeros(len(values_NK), dtype=torch.int32)
        self._num_columns = len(values_NK)
        self.nbytes = values_NK.nbytes + self._scale_N.nbytes

    def apply(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T`, [M, N] in the dtype of `x`."""
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, self._num_columns)
        scale_M1 = x_MK.abs().amax(dim=1, keepdim=True).clamp_(min=1e-20).div_(_ACTIVATION_LEVELS)
        rounded_MK = x_MK.mul(scale_M1.reciprocal()).round_().to(torch.int8)
        if self._product == "packed":
            return _packed_product(rounded_MK, self._values, self._scale_N, self._zero_N, x_MK.dtype).mul_(scale_M1)
        multiply = _integer_product if self._product == "integer" else _float_product
        return multiply(rounded_MK, self._values).mul_(self._scale_N).to(x_MK.dtype).mul_(scale_M1)


@cache
def best_product() -> Product:
    """Return the fastest product that is exact on this processor, tried on the largest int8 values."""
    x_MK = torch.full((16, _PROBE_WIDTH), _LEVELS, dtype=torch.int8)
    x_MK[1::2] = -_LEVELS
    values_NK = x_MK.clone()
    values_NK[:, _PROBE_WIDTH // 2 :] = 1
    expected_MN = _float_product(x_MK, values_NK)
    for product in ("packed", "integer"):
        if _is_exact(product, x_MK, values_NK, expected_MN):
            return product
    return "float"


def _is_exact(product: Product, x_MK: torch.Tensor, values_NK: torch.Tensor, expected_MN: torch.Tensor) -> bool:
    try:
        if product == "packed":
            scale_N, zero_N = torch.ones(len(values_NK)), torch.zeros(len(values_NK), dtype=torch.int32)
            got_MN = _packed_product(x_MK, _prepack(values_NK), scale_N, zero_N, torch.float32)
        else:
            got_MN = _integer_product(x_MK, values_NK)
    except (AttributeError, RuntimeError, TypeError):  # this torch or this processor lacks the product
        return False
    return bool((got_MN == expected_MN).all())


def _prepack(values_NK: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(values_NK, None)
    return packed


def _packed_product(
    x_MK: torch.Tensor, packed: torch.Tensor, scale_N: torch.Tensor, zero_N: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    product_MN: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x_MK, 1.0, 0, packed, scale_N, zero_N, None, 1.0, 0, dtype, "none", [], ""
    )
    return product_MN


def _integer_product(x_MK: torch.Tensor, values_NK: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x_MK, values_NK.t()).float()


def _float_product(x_MK: torch.Tensor, values_NK: torch.Tensor) -> torch.Tensor:
    return F.linear(x_MK.float(), values_NK.float())
