"""Rounding to 8 bits with a scale per row: the specification of `quantize` and `dequantize`."""

from __future__ import annotations

import torch

from transom_kernels.eight_bits import LARGEST

TINY = 1e-12  # a row of zeros has this for its largest element


def quantize_reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See `op.quantize`."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1).clamp(min=TINY) / LARGEST[dtype]
    scaled = (wide / scale[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def dequantize_reference(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `op.dequantize`."""
    return (values.float() * scale[..., None]).to(dtype)
