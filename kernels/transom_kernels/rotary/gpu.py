"""Launch of the RoPE kernel.

Legend: T tokens, H heads, R rotated width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import next_power_of_two
from transom_kernels.rotary.kernel import rotate

HEAD_ELEMENTS = 2048  # of a program


def rotary_triton_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """The contract is that of `op.rotary_`."""
    tokens, heads, width = x.shape[0], x.shape[1], cos.shape[-1]
    block_r = next_power_of_two(width)
    block_h = min(next_power_of_two(heads), max(1, HEAD_ELEMENTS // block_r))
    if not x.numel():
        return
    rotate[(tokens, -(-heads // block_h))](
        x, cos, signed_sin, x.stride(0), x.stride(1), cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0,
        H=heads, R=width, INTERLEAVED=interleaved, BLOCK_H=block_h, BLOCK_R=block_r, num_warps=4,
    )  # fmt: skip
