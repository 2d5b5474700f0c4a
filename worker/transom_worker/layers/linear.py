"""Linear layers: torch's own, CPU kernels over packed weights, and int8.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.linear import PackedWeight, can_pack, linear, pack_weight
from transom_worker.errors import ConfigError
from transom_worker.layers.int8 import Int8Weight

Quantization = Literal["none", "int8"]


class Linear(ABC):
    """`x @ weight.T + bias`, alone or added to a residual. `weight_bytes` is the size of the weight."""

    weight_bytes: int
    adds_in_product = False  # whether `add_to` adds the residual in the product, without another pass over memory

    @abstractmethod
    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [M, N]; `residual` is not changed."""
        return residual_MN + self(x_MK)


def make_linear(
    weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *, quantization: Quantization = "none"
) -> Linear:
    """Return the fastest linear layer for this weight's device and dtype.

    Raises:
        ConfigError: int8 was requested, but the weight is not on a CPU in bfloat16 or float32.
    """
    if quantization == "int8":
        if weight_NK.device.type != "cpu" or weight_NK.dtype == torch.float16:
            raise ConfigError(
                f"quantization int8 was requested on {weight_NK.device.type} in {weight_NK.dtype}; it runs on CPUs in bfloat16 "
                "or float32. Use --device cpu --dtype bfloat16, or --quantization none."
            )
        return Int8Linear(weight_NK, bias_N)
    if runs_packed(weight_NK, quantization):
        return PackedLinear(pack_weight(weight_NK, bias_N))
    return PlainLinear(weight_NK, bias_N)


def runs_packed(weight_NK: torch.Tensor, quantization: Quantization) -> bool:
    """Whether this weight is packed for the CPU kernels."""
    return quantization == "none" and uses_cpu_kernels(weight_NK) and can_pack(weight_NK)


class PlainLinear(Linear):
    """torch's own linear layer."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK, self._bias_N = weight_NK.contiguous(), bias_N
        self.weight_bytes = weight_NK.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        return F.linear(x_MK, self._weight_NK, self._bias_N)


class PackedLinear(Linear):
    """A packed weight, multiplied by the CPU kernels; the residual is added in the same pass."""

    adds_in_product = True

    def __init__(self, weight: PackedWeight) -> None:
        """Its bias is part of `weight`."""
        self.weight = weight
        self.weight_bytes = weight.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        return linear(x_MK, self.weight)

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, rounded once, [M, N]."""
        return linear(x_MK, self.weight, residual_MN)


class Int8Linear(Linear):
    """int8 weights with one scale for each output column."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight, self._bias_N = Int8Weight(weight_NK), bias_N
        self.weight_bytes = self._weight.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        y_MN = self._weight.apply(x_MK)
        return y_MN if self._bias_N is None else y_MN.add_(self._bias_N)
