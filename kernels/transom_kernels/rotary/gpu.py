"""Rotary position embedding (RoPE) on GPUs: the Triton kernel `rotate`, which rotates pairs of head elements in place.

For each pair (i, j) of a head: x[i], x[j] = x[i] cos[i] + x[j] signed_sin[i],  x[j] cos[j] + x[i] signed_sin[j].
Pairs are (i, i + R / 2), or (2i, 2i + 1) if INTERLEAVED.

Legend: T tokens, H heads, D head width, R rotated width.
"""

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two
from transom_kernels.triton_math import partner

HEAD_ELEMENTS = 2048  # elements of heads that one program rotates


def rotary_triton_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first R elements of each head of `x` [T, H, D] in place, by tables [T, 1 or H, R]."""
    tokens, heads, width = x.shape[0], x.shape[1], cos.shape[-1]
    block_r = next_power_of_two(width)
    block_h = min(next_power_of_two(heads), max(1, HEAD_ELEMENTS // block_r))
    if not x.numel():
        return
    rotate[(tokens, -(-heads // block_h))](
        x, cos, signed_sin, x.stride(0), x.stride(1), cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0,
        H=heads, R=width, INTERLEAVED=interleaved, BLOCK_H=block_h, BLOCK_R=block_r, num_warps=4,
    )  # fmt: skip


@triton.jit
def rotate(
    x,  # [T, H, at least R], in place: the first R elements of each head
    cos,  # [T, 1 or H, R]
    signed_sin,  # as cos: the sine, negated for the first element of each pair
    x_stride_t,
    x_stride_h,
    table_stride_t,
    table_stride_h,
    H: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Rotate `BLOCK_H` heads of one token. The grid is (T, blocks of heads).

    One program holds both elements of every pair and reads both before it writes either.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_R)
    inside = (head < H)[:, None] & (i < R)[None, :]
    rows = x + token * x_stride_t + head[:, None] * x_stride_h
    value = tl.load(rows + i[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(rows + partner(i, R, INTERLEAVED)[None, :], mask=inside, other=0.0).to(tl.float32)
    table = token * table_stride_t + head[:, None] * table_stride_h + i[None, :]
    rotated = value * tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    rotated += other * tl.load(signed_sin + table, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # wait until all warps of this program have read their elements
    tl.store(rows + i[None, :], rotated.to(x.dtype.element_ty), mask=inside)
