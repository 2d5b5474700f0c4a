"""Decides which layers have weights in 8 or 4 bits, and in which format.

- int8, int4: weights are rounded when they are loaded, with a scale and a minimum for every group of 32 columns of a row.
- gguf: matrices that a GGUF file stores in such groups (Q8_0, Q4_0, Q4_1) stay as stored; others are dequantised.
- none: matrices that a quantised checkpoint of another kind stores in groups that fit stay so, on CPUs and GPUs (`weights.load`).

On CPUs, activations are rounded to 16 bits, row by row and group by group (`transom_kernels.quantised_linear`).

Legend: N output width, K input width.
"""

from typing import Literal

import torch

from transom_core.errors import ConfigError
from transom_kernels.quantised_linear import Format, StoredRows, quantise

Quantization = Literal["none", "int8", "int4", "gguf"]
Weight = torch.Tensor | StoredRows  # [N, K]

QUANTISED_DTYPES = (torch.bfloat16, torch.float32)  # of models whose layers may have such weights
_FORMATS: dict[Quantization, Format] = {"int8": "int8_min", "int4": "int4_min"}


def quantised_rows(weight_NK: Weight, quantization: Quantization) -> StoredRows | None:
    """Return a layer's weight in 8 or 4 bits, rounded now or as stored; None if the layer computes in the weight's dtype.

    Raises:
        ConfigError: the weight is not on a CPU in bfloat16 or float32.
    """
    if not isinstance(weight_NK, torch.Tensor):
        return weight_NK
    check_quantization(quantization, weight_NK.device, weight_NK.dtype)
    return quantise(weight_NK, _FORMATS[quantization]) if quantization in _FORMATS else None


def check_quantization(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Check that layers on this device and in this dtype can have weights in 8 or 4 bits.

    Raises:
        ConfigError: a quantisation was requested, and the layers are not on a CPU in bfloat16 or float32.
    """
    if quantization != "none" and (device.type != "cpu" or dtype not in QUANTISED_DTYPES):
        raise ConfigError(
            f"quantization {quantization} was requested on {device.type} in {dtype}; it runs on CPUs in bfloat16 or float32. "
            "Use --device cpu --dtype bfloat16, or --quantization none."
        )
