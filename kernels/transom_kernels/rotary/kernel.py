"""Rotation of head pairs in Triton, in place.

Legend: T tokens, H heads, R rotated width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import partner


@triton.jit
def rotate(
    x,  # [T, H, R] of wider heads, in place
    cos,  # [T, 1 or H, R]
    signed_sin,
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
    """`BLOCK_H` heads of one token. Both elements of every pair are read before either is written: one program has them both."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_R)
    inside = (head < H)[:, None] & (i < R)[None, :]
    rows = x + token * x_stride_t + head[:, None] * x_stride_h
    mine = tl.load(rows + i[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(rows + partner(i, R, INTERLEAVED)[None, :], mask=inside, other=0.0).to(tl.float32)
    table = token * table_stride_t + head[:, None] * table_stride_h + i[None, :]
    turned = mine * tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    turned += other * tl.load(signed_sin + table, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # between warps of this program
    tl.store(rows + i[None, :], turned.to(x.dtype.element_ty), mask=inside)
