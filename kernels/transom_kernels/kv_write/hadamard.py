"""The Hadamard rotation of query and key heads, which spreads the outlier channels of keys before they are quantised to 4 bits.

The matrix M is symmetric and orthonormal, so it is its own inverse: (q M) . (k M) = q . k, and rotation does not change scores.
Blocks along its diagonal are as wide as the largest power of two that divides the head's width. A head of width 6 has three blocks:

    [1  1]
    [1 -1] / sqrt(2)
"""

from __future__ import annotations

import math
from functools import cache

import torch


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Return heads [..., D] times the Hadamard matrix, computed in float32; the result is contiguous, in the dtype of `x`."""
    width = x.shape[-1]
    block = block_of(width)
    rows = x.float().reshape(*x.shape[:-1], width // block, block)
    return (rows @ _matrix(block, x.device)).flatten(-2).to(x.dtype).contiguous()


def block_of(width: int) -> int:
    """Return the width of the matrix's blocks: the largest power of two that divides the head's width."""
    return width & -width


@cache
def _matrix(width: int, device: torch.device) -> torch.Tensor:
    """Return one block of the matrix, [width, width]; `width` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return (matrix / math.sqrt(width)).to(device)
