"""Launches of the 8-bit conversion kernels.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch

from transom_kernels.eight_bits import LARGEST
from transom_kernels.launch import next_power_of_two, warps_for
from transom_kernels.quantize.kernel import dequantize_rows, quantize_rows

MOST_ELEMENTS = 2048  # of a row that a program of `dequantize_rows` converts


def quantize_triton(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is that of `op.quantize`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = next_power_of_two(width)
    if rows:
        quantize_rows[(rows,)](
            x, values, scales, x.stride(0),
            N=width, LARGEST=LARGEST[dtype], TO_INTEGER=dtype is torch.int8, BLOCK_N=block, num_warps=warps_for(block),
        )  # fmt: skip
    return values, scales


def dequantize_triton(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The contract is that of `op.dequantize`."""
    values = values if values.stride(1) == 1 else values.contiguous()
    rows, width = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    block = min(MOST_ELEMENTS, next_power_of_two(width))
    if rows:
        dequantize_rows[(rows, -(-width // block))](
            values, scale, out, values.stride(0), width, BLOCK_N=block, num_warps=4
        )
    return out
