"""Hyper-connections (DeepSeek V4) on CPUs: the kernel of `hc_norm` and its launch.

Sums over streams and over a row are always added in the same order, so a token's result does not depend on other tokens.

Legend: T tokens, S residual streams, N hidden width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import LOAD_LANES, NUM_BYTES, STORE_LANES, float_argument, fma, lane_sum, splat, sqrt
from transom_kernels.cpu.vector_code import LANES
from transom_kernels.cpu.work import argument, each_item, helper

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


NORM = numbers_of(NormArguments)


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
