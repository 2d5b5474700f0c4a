"""Conversion to 8 bits with a scale per row: the specification of `quantize` and `dequantize`.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch

from transom_kernels.eight_bits import LARGEST

TINY = 1e-12  # the least magnitude that is divided by, so that a row of zeros has a scale


def quantize_reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is that of `op.quantize`."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1).clamp(min=TINY) / LARGEST[dtype]
    scaled = (wide / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def dequantize_reference(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The contract is that of `op.dequantize`."""
    return (values.float() * scale[..., None]).to(dtype)
