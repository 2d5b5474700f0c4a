"""Hyper-connections (DeepSeek V4) on CPUs: the kernels of the `hc_*` operators and their launches.

    input  = sum_s pre[s] * x[s]                                 what a sublayer reads of a token's residual streams x
    x'[to] = sum_from mix[from, to] * x[from] + post[to] * y     the streams after the sublayer, whose output is y

pre, post and mix are coefficients, which are computed for each token (`op.py`).

Sums over streams and over a row are always added in the same order, so a token's result does not depend on other tokens.

Legend: T tokens, S residual streams (up to 16), N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.rows import make_row_products
from transom_kernels.cpu.simd import (
    LOAD_LANES,
    NUM_BYTES,
    ROUND,
    STORE_LANES,
    exp,
    float_argument,
    fma,
    keep_nan,
    keep_part,
    lane_max,
    lane_sum,
    load_f32,
    load_part_f32,
    load_scalar_f32,
    row_access,
    sigmoid,
    splat,
    sqrt,
    store_f32,
    store_part_f32,
    store_scalar_f32,
)
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import LANES
from transom_kernels.cpu.work import argument, each_item, helper, scratch

MAX_STREAMS = LANES  # most streams: a token's pre, its post, and each row of its mix must fit into one vector
CHUNK = 512  # elements of N in a work item
# tokens of a tile of `project_streams`, and its coefficients: TILE ** 2 sums fill the registers
TILE = 4 if cpu_target().avx512 else 2

_MODULE = "transom_kernels.hyper_connections.cpu"
_ROW = 4 * LANES  # bytes of a row of coefficients in scratch
_SCRATCH_BYTES = (MAX_STREAMS + 1) * _ROW  # the rows of a token's mix, and one of post or pre


class StreamArguments(NamedTuple):
    """The argument words of the streams."""

    x: torch.Tensor  # [T, S, N]
    num_streams: int  # S
    width: int  # N
    token_stride: int  # bytes
    stream_stride: int

    @classmethod
    def of(cls, x: torch.Tensor) -> StreamArguments:
        """Return the words of `x` [T, S, N]."""
        return cls(x, x.shape[1], x.shape[2], x.stride(0) * x.itemsize, x.stride(1) * x.itemsize)


class NormArguments(NamedTuple):
    """The argument words of `normalise_streams`."""

    streams: StreamArguments
    out: torch.Tensor  # [T, S, N] float32
    eps: float


class ProjectArguments(NamedTuple):
    """The argument words of `project_streams`."""

    streams: StreamArguments
    weight: torch.Tensor  # [M, S N] float32
    out: torch.Tensor  # [T, M] float32
    num_tokens: int
    num_coefficients: int  # M
    eps: float


class PreArguments(NamedTuple):
    """The argument words of `pre_and_mix`."""

    streams: StreamArguments
    projected: torch.Tensor  # [T, M] float32
    scale: torch.Tensor  # [M] float32
    base: torch.Tensor  # [M] float32
    num_coefficients: int  # M
    out: torch.Tensor  # [T, N]
    post: torch.Tensor | None  # [T, S] float32; None in the head
    mix: torch.Tensor | None  # [T, S, S] float32; None in the head
    rounds: int
    eps: float


class PostArguments(NamedTuple):
    """The argument words of `post_and_mix`."""

    streams: StreamArguments
    y: torch.Tensor  # [T, N]
    y_stride: int  # bytes
    post: torch.Tensor  # [T, S] float32
    mix: torch.Tensor  # [T, S, S] float32
    out: torch.Tensor  # [T, S, N]


NORM, PROJECT = numbers_of(NormArguments), numbers_of(ProjectArguments)
PRE, POST = numbers_of(PreArguments), numbers_of(PostArguments)


def fits_cpu(x: torch.Tensor) -> bool:
    """Return whether the kernels support the dtype, the number and the strides of these streams."""
    return x.dtype in DTYPES and x.shape[1] <= MAX_STREAMS and (x.stride(2) == 1 or x.shape[2] == 1)


def hc_norm_cpu(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return all streams of a token divided by their common root mean square: [T, S N] float32 of `x` [T, S, N]."""
    tokens, size, width = x.shape
    out = empty((tokens, size * width), torch.float32)
    kernel = cpu_kernel(_MODULE, "make_normalise_streams", dtype=DTYPES[x.dtype])
    launch(kernel, tokens * size, NormArguments(StreamArguments.of(x), out, eps))
    return out


def hc_project_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `hc_norm(x) @ weight.T` [T, M] float32 of `x` [T, S, N] and a contiguous float32 matrix [M, S N]."""
    tokens, size, _ = x.shape
    out = empty((tokens, len(weight)), torch.float32)
    launch(
        cpu_kernel(_MODULE, "make_project_streams", dtype=DTYPES[x.dtype], tile_size=TILE),
        -(-tokens // TILE) * -(-len(weight) // TILE),
        ProjectArguments(StreamArguments.of(x), weight, out, tokens, len(weight), eps),
        scratch_bytes=size * TILE * TILE * 4,
    )
    return out


def hc_pre_cpu(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a sublayer's input [T, N], post [T, S] and mix [T, S from, S to] of streams `x` [T, S, N].

    Coefficients are computed from the logits `projected` [T, M] * `scale` [M] + `base` [M], mix by `rounds` rounds of Sinkhorn's
    iteration (`op.hc_pre`).
    """
    tokens, size, _ = x.shape
    outputs = empty((tokens, size), torch.float32), empty((tokens, size, size), torch.float32)
    return _weighted_sum(x, (projected, scale, base), outputs, rounds=rounds, eps=eps), *outputs


def hc_head_cpu(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Return the sum [T, N] of the streams, weighted by `sigmoid(projected * scale + base) + eps`."""
    return _weighted_sum(x, (projected, scale, base), None, rounds=0, eps=eps)


def _weighted_sum(
    x: torch.Tensor,
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # projected, scale, base
    outputs: tuple[torch.Tensor, torch.Tensor] | None,  # in a sublayer: post and mix, which the kernel fills
    *,
    rounds: int,
    eps: float,
) -> torch.Tensor:
    """Return sum_s pre[s] * x[s], [T, N] in the dtype of `x`."""
    tokens, _, width = x.shape
    out = empty((tokens, width), x.dtype)
    # a token has an item for each chunk of its sum, and in a sublayer one more, for post and mix
    items_of_token = -(-width // CHUNK) + (0 if outputs is None else 1)
    projected, scale, base = (part.contiguous() for part in logits)
    post, mix = outputs or (None, None)
    launch(
        cpu_kernel(_MODULE, "make_pre_and_mix", dtype=DTYPES[x.dtype], chunk=CHUNK),
        tokens * items_of_token,
        PreArguments(
            streams=StreamArguments.of(x),
            projected=projected,
            scale=scale,
            base=base,
            num_coefficients=len(base),
            out=out,
            post=post,
            mix=mix,
            rounds=rounds,
            eps=eps,
        ),
        scratch_bytes=_SCRATCH_BYTES,
    )
    return out


def hc_post_cpu(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Return the streams after a sublayer, `mix^T x + post * y` [T, S, N]; `y` [T, N] is its output, `x` the streams before it."""
    tokens, size, width = x.shape
    out = empty((tokens, size, width), x.dtype)
    launch(
        cpu_kernel(_MODULE, "make_post_and_mix", dtype=DTYPES[x.dtype], chunk=CHUNK),
        tokens * -(-width // CHUNK),
        PostArguments(
            streams=StreamArguments.of(x),
            y=y,
            y_stride=y.stride(0) * y.itemsize,
            post=post.contiguous(),
            mix=mix.contiguous(),
            out=out,
        ),
        scratch_bytes=_SCRATCH_BYTES,
    )
    return out


# --- kernels


def make_normalise_streams(dtype: str) -> Any:
    """Build the kernel of `hc_norm_cpu`. A work item is one stream of a token, and reads all of the token's streams."""
    load, store, size = LOAD_LANES[dtype], STORE_LANES["f32"], NUM_BYTES[dtype]
    inverse_rms = _make_inverse_rms(dtype)

    @each_item
    def normalise_streams(arguments, thread, item):
        streams, width = argument(arguments, NORM.streams.num_streams), argument(arguments, NORM.streams.width)
        factor = splat(inverse_rms(arguments, item // streams, float_argument(arguments, NORM.eps)))
        x = _stream_address(arguments, item // streams, item % streams)
        out = argument(arguments, NORM.out) + item * width * 4
        for n in range(0, width, LANES):
            store(out + 4 * n, load(x + n * size, width - n) * factor, width - n)

    return normalise_streams


def make_project_streams(dtype: str, tile_size: int) -> Any:
    """Build the kernel of `hc_project_cpu`. A work item is a tile of tokens and coefficients; tokens vary fastest.

    Scratch: a tile of products for each stream.
    """
    products, inverse_rms = make_row_products(dtype, tile_size), _make_inverse_rms(dtype)

    @each_item
    def project_streams(arguments, thread, item):
        tokens, coefficients = argument(arguments, PROJECT.num_tokens), argument(arguments, PROJECT.num_coefficients)
        streams, width = argument(arguments, PROJECT.streams.num_streams), argument(arguments, PROJECT.streams.width)
        tiles = (tokens + tile_size - 1) // tile_size
        first, column = item % tiles * tile_size, item // tiles * tile_size
        rows, columns = min(tile_size, tokens - first), min(tile_size, coefficients - column)
        sums, sum_bytes = scratch(thread), 4 * tile_size**2
        weight = argument(arguments, PROJECT.weight) + column * streams * width * 4
        for stream in range(streams):
            products(
                _stream_address(arguments, first, stream), argument(arguments, PROJECT.streams.token_stride), rows - 1,
                weight + stream * width * 4, streams * width * 4, columns - 1, width, sums + stream * sum_bytes, 4 * tile_size,
            )  # fmt: skip
        for row in range(rows):
            factor = inverse_rms(arguments, first + row, float_argument(arguments, PROJECT.eps))
            out = argument(arguments, PROJECT.out) + ((first + row) * coefficients + column) * 4
            for index in range(columns):
                total = 0.0
                for stream in range(streams):
                    total += load_scalar_f32(sums + stream * sum_bytes + 4 * (row * tile_size + index))
                store_scalar_f32(out + 4 * index, total * factor)

    return project_streams


@helper
def _stream_address(arguments, token, stream):
    """Return the address of a token's stream. The words of the streams come first in the arguments of every kernel here."""
    strides = token * argument(arguments, NORM.streams.token_stride) + stream * argument(
        arguments, NORM.streams.stream_stride
    )
    return argument(arguments, NORM.streams.x) + strides


def _make_inverse_rms(dtype: str) -> Any:
    """Build inverse_rms(arguments, token, eps) = 1 / sqrt(mean(x ** 2) + eps), over all streams of a token."""
    load, size = LOAD_LANES[dtype], NUM_BYTES[dtype]

    @helper
    def inverse_rms(arguments, token, eps):
        streams, width = argument(arguments, NORM.streams.num_streams), argument(arguments, NORM.streams.width)
        total = splat(0.0)
        for stream in range(streams):
            x = _stream_address(arguments, token, stream)
            for n in range(0, width, LANES):
                lanes = load(x + n * size, width - n)
                total = fma(lanes, lanes, total)
        return 1.0 / sqrt(lane_sum(total) / (streams * width) + eps)

    return inverse_rms


@helper
def _logits(projected, scale, base, at, count):
    """Return projected * scale + base of `count` coefficients from `at` on."""
    product = load_part_f32(projected + 4 * at, count) * load_part_f32(scale + 4 * at, count)
    return product + load_part_f32(base + 4 * at, count)


@helper
def _balanced_mix(rows, projected, scale, base, size, rounds, eps):
    """Write a token's mix to `rows`: softmax over targets plus eps, then Sinkhorn's iteration, columns first and last.

    Elements after the first `size` of a row are 0; a column of zeros is divided by 1.
    """
    for row in range(size):
        logits = keep_part(_logits(projected, scale, base, (2 + row) * size, size), size, float("-inf"))
        below = logits - splat(lane_max(logits))
        shares = keep_part(keep_nan(exp(below), below), size, 0.0)
        store_f32(rows + row * _ROW, keep_part(shares / splat(lane_sum(shares)) + splat(eps), size, 0.0))
    for turn in range(2 * rounds - 1):
        if turn % 2 == 0:
            total = splat(0.0)
            for row in range(size):
                total = total + load_f32(rows + row * _ROW)
            divisor = keep_part(total + splat(eps), size, 1.0)
            for row in range(size):
                store_f32(rows + row * _ROW, load_f32(rows + row * _ROW) / divisor)
        else:
            for row in range(size):
                values = load_f32(rows + row * _ROW)
                store_f32(rows + row * _ROW, values / splat(lane_sum(values) + eps))


def make_pre_and_mix(dtype: str, chunk: int) -> Any:
    """Build the kernel of `hc_pre_cpu` and `hc_head_cpu`. A work item is `chunk` elements of a token's weighted sum.

    In a sublayer each token has one more item, its first, which computes post and mix. Scratch: S + 1 rows of 16 float32.
    """
    load, store, num_bytes = row_access(dtype)

    @each_item
    def pre_and_mix(arguments, thread, item):
        size, width = argument(arguments, PRE.streams.num_streams), argument(arguments, PRE.streams.width)
        post, mix = argument(arguments, PRE.post), argument(arguments, PRE.mix)
        mixes = 1 if mix != 0 else 0  # a token's items for post and mix; that item is part -1
        parts = (width + chunk - 1) // chunk + mixes
        token, part = item // parts, item % parts - mixes
        projected = argument(arguments, PRE.projected) + token * argument(arguments, PRE.num_coefficients) * 4
        scale, base = argument(arguments, PRE.scale), argument(arguments, PRE.base)
        eps, rows = float_argument(arguments, PRE.eps), scratch(thread)
        if part < 0:
            _balanced_mix(rows, projected, scale, base, size, argument(arguments, PRE.rounds), eps)
            for row in range(size):
                store_part_f32(mix + (token * size + row) * size * 4, load_f32(rows + row * _ROW), size)
            logits = _logits(projected, scale, base, size, size)
            store_part_f32(post + token * size * 4, splat(2.0) * keep_nan(sigmoid(logits), logits), size)
            return
        logits = _logits(projected, scale, base, 0, size)
        store_f32(rows, keep_nan(sigmoid(logits), logits) + splat(eps))
        out = argument(arguments, PRE.out) + token * width * num_bytes
        for n in range(part * chunk, min((part + 1) * chunk, width), LANES):
            total = splat(0.0)
            for stream in range(size):
                values = load(_stream_address(arguments, token, stream) + n * num_bytes, width - n)
                total = fma(splat(load_scalar_f32(rows + 4 * stream)), values, total)
            store(out + n * num_bytes, total, width - n)

    return pre_and_mix


def make_post_and_mix(dtype: str, chunk: int) -> Any:
    """Build the kernel of `hc_post_cpu`. A work item is `chunk` elements of all of a token's streams.

    Values are rounded wherever separate operators would have written a tensor. Scratch: S + 1 rows of 16 float32.
    """
    (load, store, num_bytes), rounded = row_access(dtype), ROUND[dtype]

    @each_item
    def post_and_mix(arguments, thread, item):
        size, width = argument(arguments, POST.streams.num_streams), argument(arguments, POST.streams.width)
        parts = (width + chunk - 1) // chunk
        token, part = item // parts, item % parts
        rows = scratch(thread)  # the mix, then post
        for row in range(size):
            share = load_part_f32(argument(arguments, POST.mix) + (token * size + row) * size * 4, size)
            store_f32(rows + row * _ROW, rounded(share))
        post = rows + size * _ROW
        store_f32(post, rounded(load_part_f32(argument(arguments, POST.post) + token * size * 4, size)))
        y = argument(arguments, POST.y) + token * argument(arguments, POST.y_stride)
        out = argument(arguments, POST.out) + token * size * width * num_bytes
        for n in range(part * chunk, min((part + 1) * chunk, width), LANES):
            addend = load(y + n * num_bytes, width - n)
            for to in range(size):
                total = splat(0.0)
                for stream in range(size):
                    values = load(_stream_address(arguments, token, stream) + n * num_bytes, width - n)
                    total = fma(splat(load_scalar_f32(rows + stream * _ROW + 4 * to)), values, total)
                total = fma(splat(load_scalar_f32(post + 4 * to)), addend, rounded(total))
                store(out + (to * width + n) * num_bytes, total, width - n)

    return post_and_mix
