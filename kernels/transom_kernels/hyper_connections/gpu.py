"""Hyper-connections (DeepSeek V4) on GPUs: the kernels `normalise_streams`, `pre_and_mix`, `post_and_mix`, and their launches.

    input  = sum_s pre[s] * x[s]                                 what a sublayer reads of a token's residual streams x
    x'[to] = sum_from mix[from, to] * x[from] + post[to] * y     the streams after the sublayer, whose output is y

pre, post and mix are coefficients, which are computed for each token (`op.py`). A program of `pre_and_mix` or `post_and_mix`
computes a range of elements of one token for all of its residual streams, so sums over streams stay inside a thread. Values are
rounded only where torch's operators would have written a tensor.

Legend: T tokens, S residual streams (padded to BLOCK_S), N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two, warps_for

ROW_ELEMENTS = 16_384  # elements of a row that a program reads at once: 32 registers in each thread of 16 warps
# elements of each stream that a program reads: each of its 128 threads reads 8, which is one load of 16 bytes in a 16-bit dtype
STREAM_ELEMENTS = 1024


def row_block(width: int) -> tuple[int, int]:
    """Return the elements of a row that a program reads at once, and the program's warps."""
    block = min(ROW_ELEMENTS, next_power_of_two(width))
    return block, warps_for(block)


def stream_blocks(num_residual_streams: int, width: int) -> tuple[int, int]:
    """Return the streams (padded to a power of two) and the elements of each stream that one program computes."""
    return next_power_of_two(num_residual_streams), min(STREAM_ELEMENTS, next_power_of_two(width))


def hc_norm_triton(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return all streams of a token divided by their common root mean square: [T, S N] float32 of `x` [T, S, N]."""
    rows = x.flatten(1)  # a copy if all streams are one tensor (stride 0), as after the embedding
    if rows.stride(1) != 1:  # if N is 1, or streams are transposed
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
    """Return a sublayer's input [T, N], post [T, S] and mix [T, S from, S to] of streams `x` [T, S, N].

    Coefficients are computed from the logits `projected` [T, M] * `scale` [M] + `base` [M], mix by `rounds` rounds of Sinkhorn's
    iteration (`op.hc_pre`).
    """
    tokens, num_streams, _ = x.shape
    post = torch.empty((tokens, num_streams), dtype=torch.float32, device=x.device)
    mix = torch.empty((tokens, num_streams, num_streams), dtype=torch.float32, device=x.device)
    return _launch_pre(x, projected, scale, base, post, mix, rounds, eps), post, mix


def hc_head_triton(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Return the sum [T, N] of the streams, weighted by `sigmoid(projected * scale + base) + eps`."""
    return _launch_pre(x, projected, scale, base, projected, projected, 0, eps)


def hc_post_triton(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Return the streams after a sublayer, `mix^T x + post * y` [T, S, N]; `y` [T, N] is its output, `x` the streams before it."""
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
    """Launch `pre_and_mix`; return the weighted sum of the streams, [T, N].

    In a sublayer the kernel fills `post` and `mix`. The head has neither, and passes any float32 tensors.
    """
    tokens, num_streams, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block_s, block_n = stream_blocks(num_streams, width)
    # in a sublayer (M > S) each token has one more program, which computes post and mix
    num_programs = -(-width // block_n) + (projected.shape[1] > num_streams)
    if tokens:
        pre_and_mix[(tokens * num_programs,)](
            x, projected.contiguous(), scale.contiguous(), base.contiguous(), out, post, mix, x.stride(0), x.stride(1),
            rounds, eps, S=num_streams, N=width, M=projected.shape[1], BLOCK_S=block_s, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def normalise_streams(x, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """Compute out[t] = x[t] / sqrt(mean(x[t] ** 2) + eps), [T, WIDTH] float32, where WIDTH is S * N.

    The grid is (tokens). A row of several blocks is read twice, the second time from the GPU's cache.
    """
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
    """Return projected * scale + base of the coefficients `at` where `inside`, else 0."""
    value = tl.load(projected + at, mask=inside, other=0.0)
    return value * tl.load(scale + at, mask=inside, other=0.0) + tl.load(base + at, mask=inside, other=0.0)


@triton.jit
def _sinkhorn(logits, inside, present, rounds, eps):
    """Return the mixing matrix [BLOCK_S from, BLOCK_S to] of its logits: softmax over targets, then Sinkhorn's iteration.

    Columns and rows are divided by their sums plus `eps` in turn, columns first and last.
    """
    logits = tl.where(inside, logits, float("-inf"))
    weights = tl.exp(logits - tl.where(present, tl.max(logits, 1), 0.0)[:, None])
    total = tl.where(present, tl.sum(weights, 1), 1.0)
    mix = tl.where(inside, weights / total[:, None] + eps, 0.0)
    floor = tl.where(present, eps, 1.0)  # the zeros of padded streams are divided by 1
    mix = mix / (tl.sum(mix, 0) + floor)[None, :]
    for _ in range(rounds - 1):
        mix = mix / (tl.sum(mix, 1) + floor)[:, None]
        mix = mix / (tl.sum(mix, 0) + floor)[None, :]
    return mix


@triton.jit
def pre_and_mix(
    x,  # [T, S, N]
    projected,  # [T, M] float32
    scale,  # [M] float32
    base,  # [M] float32
    out,  # [T, N]
    post,  # [T, S] float32; unused in the head
    mix,  # [T, S, S] float32; unused in the head
    x_stride_t,
    x_stride_s,
    rounds,  # of Sinkhorn's iteration
    eps,
    S: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute `BLOCK_N` elements of a sublayer's input, or a token's post and mix, from logits projected * scale + base.

    The grid is (tokens * programs per token). In a sublayer (M > S) the first program of a token computes post and mix instead of
    input elements: mix is a chain of many short steps, which the other programs thus neither wait for nor repeat.
    """
    HAS_MIX: tl.constexpr = M > S
    NUM_PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N + HAS_MIX
    token, part = tl.program_id(0).to(tl.int64) // NUM_PROGRAMS, tl.program_id(0) % NUM_PROGRAMS
    projected += token * M
    s = tl.arange(0, BLOCK_S)
    # the first program of a token in a sublayer: post and mix
    if HAS_MIX:
        if part == 0:
            row, column = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_S)[None, :]
            inside = (row < S) & (column < S)
            logits = _coefficients(projected, scale, base, 2 * S + row * S + column, inside)
            mix_value = _sinkhorn(logits, inside, s < S, rounds, eps)
            tl.store(mix + token * S * S + row * S + column, mix_value, mask=inside)
            post_value = 2 * tl.sigmoid(_coefficients(projected, scale, base, S + s, s < S))
            tl.store(post + token * S + s, post_value, mask=s < S)
            return
        part -= 1
    # the weighted sum of the streams
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = tl.sigmoid(_coefficients(projected, scale, base, s, s < S)) + eps
    streams = x + token * x_stride_t + s[:, None] * x_stride_s + n[None, :]
    values = tl.load(streams, mask=(s < S)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)  # [BLOCK_S, BLOCK_N]
    tl.store(out + token * N + n, tl.sum(weight[:, None] * values, 0).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def post_and_mix(
    y,  # [T, N]
    x,  # [T, S, N]
    post,  # [T, S] float32
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
    """Compute `BLOCK_N` elements of all of a token's streams: sum_from mix[from, to] * x[from] + post[to] * y.

    The grid is (tokens * programs per token). Each input stream is read once.
    """
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
        weight = tl.load(post + token * S + to).to(kind).to(tl.float32)
        mixed = tl.sum(share[:, None] * values, 0).to(kind).to(tl.float32)
        tl.store(out + (token * S + to) * N + n, (mixed + weight * addend).to(kind), mask=n < N)
