"""The operators `quantize` and `dequantize`: rows as 8-bit numbers with one float32 scale per row.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch

from transom_kernels.eight_bits import LARGEST
from transom_kernels.launch import uses_triton
from transom_kernels.quantize.reference import dequantize_reference, quantize_reference


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [T, N] as `dtype` (int8 or float8_e4m3fn, symmetric), and each row's scale [T] in float32.

    A row's largest magnitude becomes the format's largest number. Values are rounded to nearest.

    Raises:
        ValueError: another dtype, or `x` has not two axes.
    """
    if dtype not in LARGEST or x.dim() != 2:
        raise ValueError(
            f"x {tuple(x.shape)} cannot become {dtype}; give [rows, width], and one of {', '.join(map(str, LARGEST))}."
        )
    if uses_triton(x):
        from transom_kernels.quantize.gpu import quantize_triton

        return quantize_triton(x, dtype)
    return quantize_reference(x, dtype)


def dequantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` [T, N] times `scale` [T], in `dtype`.

    Raises:
        ValueError: there is not one scale per row.
    """
    if values.dim() != 2 or scale.shape != values.shape[:1]:
        raise ValueError(f"values {tuple(values.shape)} need a scale per row, not {tuple(scale.shape)}.")
    if uses_triton(values):
        from transom_kernels.quantize.gpu import dequantize_triton

        return dequantize_triton(values, scale, dtype)
    return dequantize_reference(values, scale, dtype)
