"""Launches of the hyper-connections' CPU kernels.

Legend: T tokens, S residual streams, N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.target import cpu_target

MODULE = "transom_kernels.hyper_connections.cpu_kernel"
MAX_STREAMS = 16  # a row of coefficients fits into one vector
CHUNK = 512  # elements of N in an item
TILE = 4 if cpu_target().avx512 else 2  # tokens and coefficients of a tile of `project_streams`

_SCRATCH_BYTES = (MAX_STREAMS + 1) * 64


def fits_cpu(x: torch.Tensor) -> bool:
    """Whether the kernels take streams of this dtype, number and strides."""
    return x.dtype in DTYPES and x.shape[1] <= MAX_STREAMS and (x.stride(2) == 1 or x.shape[2] == 1)


def hc_norm_cpu(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.hc_norm`."""
    tokens, size, width = x.shape
    out = empty((tokens, size * width), torch.float32)
    kernel = cpu_kernel(MODULE, "make_normalise_streams", dtype=DTYPES[x.dtype])
    launch(kernel, tokens * size, [x, out, size, width, *_strides(x), eps])
    return out


def hc_project_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.hc_project`."""
    tokens, size, width = x.shape
    out = empty((tokens, len(weight)), torch.float32)
    launch(
        cpu_kernel(MODULE, "make_project_streams", dtype=DTYPES[x.dtype], tile_size=TILE),
        -(-tokens // TILE) * -(-len(weight) // TILE),
        [x, weight, out, tokens, size, width, len(weight), *_strides(x), eps],
        scratch_bytes=size * TILE * TILE * 4,
    )
    return out


def hc_pre_cpu(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract is that of `op.hc_pre`."""
    tokens, size, _ = x.shape
    post, mix = empty((tokens, size), torch.float32), empty((tokens, size, size), torch.float32)
    return _pre(x, projected, scale, base, post, mix, rounds, eps), post, mix


def hc_head_cpu(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The contract is that of `op.hc_head`."""
    return _pre(x, projected, scale, base, None, None, 0, eps)


def hc_post_cpu(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """The contract is that of `op.hc_post`."""
    tokens, size, width = x.shape
    out = empty((tokens, size, width), x.dtype)
    launch(
        cpu_kernel(MODULE, "make_post_and_mix", dtype=DTYPES[x.dtype], chunk=CHUNK),
        tokens * -(-width // CHUNK),
        [y, x, post.contiguous(), mix.contiguous(), out, size, width, y.stride(0) * y.itemsize, *_strides(x)],
        scratch_bytes=_SCRATCH_BYTES,
    )
    return out


def _pre(
    x: torch.Tensor,
    projected: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    post: torch.Tensor | None,
    mix: torch.Tensor | None,
    rounds: int,
    eps: float,
) -> torch.Tensor:
    """The weighted sum of the streams; with `post` and `mix` these are computed, too."""
    tokens, size, width = x.shape
    out = empty((tokens, width), x.dtype)
    coefficients = [part.contiguous() for part in (projected, scale, base)]
    launch(
        cpu_kernel(MODULE, "make_pre_and_mix", dtype=DTYPES[x.dtype], chunk=CHUNK),
        tokens * (-(-width // CHUNK) + (mix is not None)),
        [x, *coefficients, out, post, mix, size, width, projected.shape[1], *_strides(x), rounds, eps],
        scratch_bytes=_SCRATCH_BYTES,
    )
    return out


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """Bytes from token to token, and from stream to stream."""
    return x.stride(0) * x.itemsize, x.stride(1) * x.itemsize
