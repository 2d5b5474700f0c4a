"""Launches of the streams' kernels.

Legend: T tokens, S streams, N hidden width.
"""

from __future__ import annotations

import torch

from transom_kernels.hyper_connections.kernel import collapse, expand, normalise
from transom_kernels.launch import next_power_of_two, warps_for

ROW_ELEMENTS = 16_384  # of a row at once: 32 registers of each of 16 warps
STREAM_ELEMENTS = 1024  # of each stream, of a program: 16 bytes of each of 4 warps' threads in 16 bits


def row_block(width: int) -> tuple[int, int]:
    """Elements of a row that a program takes at once, and its warps."""
    block = min(ROW_ELEMENTS, next_power_of_two(width))
    return block, warps_for(block)


def stream_blocks(num_residual_streams: int, width: int) -> tuple[int, int]:
    """Streams, padded, and elements of each, of one program."""
    return next_power_of_two(num_residual_streams), min(STREAM_ELEMENTS, next_power_of_two(width))


def hc_norm_triton(x: torch.Tensor, eps: float) -> torch.Tensor:
    """See `op.hc_norm`."""
    rows = x.flatten(1)  # a copy where streams are one tensor still, as embeddings are
    if rows.stride(1) != 1:  # widths of 1, and streams that lie crosswise
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    block, num_warps = row_block(rows.shape[1])
    if len(rows):
        normalise[(len(rows),)](rows, out, rows.stride(0), eps, WIDTH=rows.shape[1], BLOCK_W=block, num_warps=num_warps)
    return out


def hc_pre_triton(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `op.hc_pre`."""
    tokens, size, _ = x.shape
    weights = torch.empty((tokens, size), dtype=torch.float32, device=x.device)
    mix = torch.empty((tokens, size, size), dtype=torch.float32, device=x.device)
    return _collapse(x, projected, scale, base, weights, mix, rounds, eps), weights, mix


def hc_head_triton(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """See `op.hc_head`."""
    return _collapse(x, projected, scale, base, projected, projected, 0, eps)


def hc_post_triton(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """See `op.hc_post`."""
    tokens, size, width = x.shape
    out = torch.empty((tokens, size, width), dtype=x.dtype, device=x.device)
    block_s, block_n = stream_blocks(size, width)
    if tokens:
        expand[(tokens * -(-width // block_n),)](
            y, x, weights.contiguous(), mix.contiguous(), out, y.stride(0), x.stride(0), x.stride(1),
            S=size, N=width, BLOCK_S=block_s, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out


def _collapse(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, weights: torch.Tensor,
    mix: torch.Tensor, rounds: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    tokens, size, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block_s, block_n = stream_blocks(size, width)
    num_programs = -(-width // block_n) + (projected.shape[1] > size)
    if tokens:
        collapse[(tokens * num_programs,)](
            x, projected.contiguous(), scale.contiguous(), base.contiguous(), out, weights, mix, x.stride(0), x.stride(1),
            rounds, eps, S=size, N=width, M=projected.shape[1], BLOCK_S=block_s, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out
