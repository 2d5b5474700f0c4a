"""Root-mean-square normalisation in Triton: a program a row, or a program some heads of a token.

Legend: T rows, N width, H heads, D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normalised(values, weight, n, inside, eps, N: tl.constexpr):
    scale = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    return values * scale * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def norm_rows(
    x,  # [T, N]
    residual,  # [T, N], or unused
    inner,  # [N], or unused
    weight,  # [N], or unused
    out,  # [T, N], or unused
    sums,  # [T, N], or unused
    x_stride,
    residual_stride,
    factor,
    eps,
    N: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row, normalised by `inner`; the residual added and the sum multiplied; the sum written, and normalised by `weight`.

    What a step of its own would write is rounded as if it had.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    inside = n < N
    values = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = _normalised(values, inner, n, inside, eps, N).to(sums.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
        rounded = (values.to(sums.dtype.element_ty).to(tl.float32) * factor).to(sums.dtype.element_ty)
        tl.store(sums + row * N + n, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if HAS_WEIGHT:
        normed = _normalised(values, weight, n, inside, eps, N)
        tl.store(out + row * N + n, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_heads(
    x,  # [T, H, D], in place
    weight,  # [H, D], or unused
    x_stride_t,
    x_stride_h,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`BLOCK_H` heads of one token."""
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (head < H)[:, None] & (d < D)[None, :]
    place = x + tl.program_id(0).to(tl.int64) * x_stride_t + head[:, None] * x_stride_h + d[None, :]
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    if HAS_WEIGHT:
        values *= tl.load(weight + head[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)
