"""Linear layers over plain weight tensors: torch's own, bfloat16 packed for oneDNN on CPUs, and int8.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F

from transom_worker.errors import ConfigError
from transom_worker.layers.int8 import Int8Weight
from transom_worker.layers.packed import PackedWeight

Quantization = Literal["none", "int8"]


class Linear(ABC):
    """`x @ weight.T + bias`, alone or added to a residual. `weight_bytes` is the size of the weight."""

    weight_bytes: int

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
        return PackedLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)


def runs_packed(weight_NK: torch.Tensor, quantization: Quantization) -> bool:
    """Whether this weight runs fastest in oneDNN's packed layout."""
    on_cpu = weight_NK.device.type == "cpu"
    return on_cpu and quantization == "none" and weight_NK.dtype == torch.bfloat16 and PackedWeight.available()


class PlainLinear(Linear):
    """torch's own linear layer."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK, self._bias_N = weight_NK.contiguous(), bias_N
        self.weight_bytes = weight_NK.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        return F.linear(x_MK, self._weight_NK, self._bias_N)


class PackedLinear(Linear):
    """bfloat16 on a CPU, in oneDNN's blocked layout: up to twice as fast at few rows, and the residual is added in the same
    pass.
    """

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.packed = PackedWeight(weight_NK, bias_N)
        self.weight_bytes = weight_NK.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        return self.packed.apply(x_MK)

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, rounded once, [M, N]."""
        return self.packed.combine(x_MK, residual_MN, "add")


class Int8Linear(Linear):
    """int8 weights with one scale for each output column."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight, self._bias_N = Int8Weight(weight_NK), bias_N
        self.weight_bytes = self._weight.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        y_MN = self._weight.apply(x_MK)
        return y_MN if self._bias_N is None else y_MN.add_(self._bias_N)
