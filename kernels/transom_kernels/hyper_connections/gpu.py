"""Launches of the hyper-connection kernels.

Legend: T tokens, S residual streams, N hidden width, M coefficients of a token.
"""

from __future__ import annotations

import torch

from transom_kernels.hyper_connections.kernel import normalise_streams, post_and_mix, pre_and_mix
from transom_kernels.launch import next_power_of_two, warps_for

ROW_ELEMENTS = 16_384  # of a row that a program reads at once: 32 registers of each thread of 16 warps
STREAM_ELEMENTS = 1024  # of each stream that a program reads: in 16 bits, 16 bytes for each thread of 4 warps


def row_block(width: int) -> tuple[int, int]:
    """Elements of a row that a program reads at once, and the program's warps."""
    block = min(ROW_ELEMENTS, next_power_of_two(width))
    return block, warps_for(block)


def stream_blocks(num_residual_streams: int, width: int) -> tuple[int, int]:
    """Streams (padded to a power of two) and elements of each stream of one program."""
    return next_power_of_two(num_residual_streams), min(STREAM_ELEMENTS, next_power_of_two(width))


def hc_norm_triton(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.hc_norm`."""
    rows = x.flatten(1)  # copies where all streams are one tensor, as the embedding's are
    if rows.stride(1) != 1:  # where N is 1, or streams are transposed
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    block, num_warps = row_block(rows.shape[1])
    if len(rows):
        normalise_streams[(len(rows),)](
            rows, out, rows.stride(0), eps, WIDTH=rows.shape[1], BLOCK_W=block, num_warps=num_warps
        )
    return out


def hc_pre_triton(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract is that of `op.hc_pre`."""
    tokens, num_streams, _ = x.shape
    post = torch.empty((tokens, num_streams), dtype=torch.float32, device=x.device)
    mix = torch.empty((tokens, num_streams, num_streams), dtype=torch.float32, device=x.device)
    return _launch_pre(x, projected, scale, base, post, mix, rounds, eps), post, mix


def hc_head_triton(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The contract is that of `op.hc_head`."""
    return _launch_pre(x, projected, scale, base, projected, projected, 0, eps)


def hc_post_triton(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """The contract is that of `op.hc_post`."""
    tokens, num_streams, width = x.shape
    out = torch.empty((tokens, num_streams, width), dtype=x.dtype, device=x.device)
    block_s, block_n = stream_blocks(num_streams, width)
    if tokens:
        post_and_mix[(tokens * -(-width // block_n),)](
            y, x, post.contiguous(), mix.contiguous(), out, y.stride(0), x.stride(0), x.stride(1),
            S=num_streams, N=width, BLOCK_S=block_s, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out


def _launch_pre(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, post: torch.Tensor,
    mix: torch.Tensor, rounds: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Launch `pre_and_mix`; `post` and `mix` are its outputs in a sublayer, and any float32 tensors in the head."""
    tokens, num_streams, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block_s, block_n = stream_blocks(num_streams, width)
    num_programs = -(-width // block_n) + (projected.shape[1] > num_streams)
    if tokens:
        pre_and_mix[(tokens * num_programs,)](
            x, projected.contiguous(), scale.contiguous(), base.contiguous(), out, post, mix, x.stride(0), x.stride(1),
            rounds, eps, S=num_streams, N=width, M=projected.shape[1], BLOCK_S=block_s, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out
