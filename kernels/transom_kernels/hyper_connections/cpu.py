"""Hyper-connections (DeepSeek V4) on CPUs: the kernels of `hc_norm` and `hc_project`, and their launches.

Sums over streams and over a row are always added in the same order, so a token's result does not depend on other tokens.

Legend: T tokens, S residual streams, N hidden width, M coefficients.
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
    STORE_LANES,
    float_argument,
    fma,
    lane_sum,
    load_scalar_f32,
    splat,
    sqrt,
    store_scalar_f32,
)
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import LANES
from transom_kernels.cpu.work import argument, each_item, helper, scratch

# tokens of a tile of `project_streams`, and its coefficients: TILE ** 2 sums fill the registers
TILE = 4 if cpu_target().avx512 else 2

_MODULE = "transom_kernels.hyper_connections.cpu"


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


NORM, PROJECT = numbers_of(NormArguments), numbers_of(ProjectArguments)


def fits_cpu(x: torch.Tensor) -> bool:
    """Return whether the kernels support the dtype and the strides of these streams."""
    return x.dtype in DTYPES and (x.stride(2) == 1 or x.shape[2] == 1)


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
