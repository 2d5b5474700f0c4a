"""Streams in Triton: a program has some elements of all streams of one token, or balances the token's mix.

Sums over streams stay within a thread. Nothing is rounded but what a step of its own would write.

Legend: T tokens, S streams (padded to BLOCK_S), N hidden width, M coefficients.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise(x, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """One row of `out` [T, WIDTH] float32; where a row has several blocks each is read twice, from the cache then."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    squares = tl.zeros([BLOCK_W], tl.float32)
    for begin in range(0, WIDTH, BLOCK_W):
        values = tl.load(x + row * x_stride + begin + w, mask=begin + w < WIDTH, other=0.0).to(tl.float32)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for begin in range(0, WIDTH, BLOCK_W):
        values = tl.load(x + row * x_stride + begin + w, mask=begin + w < WIDTH, other=0.0).to(tl.float32)
        tl.store(out + row * WIDTH + begin + w, values * scale, mask=begin + w < WIDTH)


@triton.jit
def _coefficients(projected, scale, base, at, inside):
    value = tl.load(projected + at, mask=inside, other=0.0)
    return value * tl.load(scale + at, mask=inside, other=0.0) + tl.load(base + at, mask=inside, other=0.0)


@triton.jit
def _balanced(logits, inside, present, rounds, eps):
    """[BLOCK_S from, BLOCK_S to]; columns and rows divided in turn, columns first and last."""
    logits = tl.where(inside, logits, float("-inf"))
    weights = tl.exp(logits - tl.where(present, tl.max(logits, 1), 0.0)[:, None])
    total = tl.where(present, tl.sum(weights, 1), 1.0)
    mix = tl.where(inside, weights / total[:, None] + eps, 0.0)
    floor = tl.where(present, eps, 1.0)  # a stream that is not there divides zeros by 1
    mix = mix / (tl.sum(mix, 0) + floor)[None, :]
    for _ in range(rounds - 1):
        mix = mix / (tl.sum(mix, 1) + floor)[:, None]
        mix = mix / (tl.sum(mix, 0) + floor)[None, :]
    return mix


@triton.jit
def collapse(
    x,  # [T, S, N]
    projected,  # [T, M] float32
    scale,  # [M] float32
    base,  # [M] float32
    out,  # [T, N]
    weights,  # [T, S] float32, or unused
    mix,  # [T, S, S] float32, or unused
    x_stride_t,
    x_stride_s,
    rounds,
    eps,
    S: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`BLOCK_N` elements of the weighed sum of a token's streams. In a sublayer a token's first program has its mix instead.

    The mix is a chain of many short steps: so the others need not wait for it, nor repeat it.
    """
    HAS_MIX: tl.constexpr = M > S
    NUM_PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N + HAS_MIX
    token, part = tl.program_id(0).to(tl.int64) // NUM_PROGRAMS, tl.program_id(0) % NUM_PROGRAMS
    projected += token * M
    s = tl.arange(0, BLOCK_S)
    if HAS_MIX:
        if part == 0:
            row, column = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[None, :]
            inside = (row < S) & (column < S)
            logits = _coefficients(projected, scale, base, 2 * S + row * S + column, inside)
            balanced = _balanced(logits, inside, s < S, rounds, eps)
            tl.store(mix + token * S * S + row * S + column, balanced, mask=inside)
            expanding = 2 * tl.sigmoid(_coefficients(projected, scale, base, S + s, s < S))
            tl.store(weights + token * S + s, expanding, mask=s < S)
            return
        part -= 1
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = tl.sigmoid(_coefficients(projected, scale, base, s, s < S)) + eps
    streams = x + token * x_stride_t + s[:, None] * x_stride_s + n[None, :]
    values = tl.load(streams, mask=(s < S)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    tl.store(out + token * N + n, tl.sum(weight[:, None] * values, 0).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def expand(
    y,  # [T, N]
    x,  # [T, S, N]
    weights,  # [T, S] float32
    mix,  # [T, S, S] float32
    out,  # [T, S, N]
    y_stride,
    x_stride_t,
    x_stride_s,
    S: tl.constexpr,
    N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`BLOCK_N` elements of a token's streams: each read once, mixed into every stream, and the weighed output added."""
    kind = out.dtype.element_ty
    PARTS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    token, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    s = tl.arange(0, BLOCK_S)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    streams = x + token * x_stride_t + s[:, None] * x_stride_s + n[None, :]
    values = tl.load(streams, mask=(s < S)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    addend = tl.load(y + token * y_stride + n, mask=n < N, other=0.0).to(tl.float32)
    for to in tl.static_range(S):
        share = tl.load(mix + token * S * S + s * S + to, mask=s < S, other=0.0).to(kind).to(tl.float32)
        weight = tl.load(weights + token * S + to).to(kind).to(tl.float32)
        mixed = tl.sum(share[:, None] * values, 0).to(kind).to(tl.float32)
        tl.store(out + (token * S + to) * N + n, (mixed + weight * addend).to(kind), mask=n < N)
