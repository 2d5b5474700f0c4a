"""A residual of several streams: normalised for its coefficients, collapsed into a sublayer's input, expanded by its output.

Coefficients are `projected * scale + base` [T, M] in float32, where `projected` is `hc_norm` times a matrix. They
begin with S logits of how streams are collapsed; in a sublayer S of how its output goes to each stream, and S * S of how
streams mix (from each, to each) follow.

Legend: T tokens, S streams, N hidden width, M coefficients: S (S + 2) in a sublayer, S in the head.
"""

from __future__ import annotations

import torch

from transom_kernels.hyper_connections.reference import (
    hc_head_reference,
    hc_norm_reference,
    hc_post_reference,
    hc_pre_reference,
)
from transom_kernels.launch import uses_triton


def hc_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """All streams of a token over their common root mean square: [T, S * N] float32 of `x` [T, S, N].

    Raises:
        ValueError: no streams.
    """
    _check_streams(x)
    if uses_triton(x):
        from transom_kernels.hyper_connections.gpu import hc_norm_triton

        return hc_norm_triton(x, eps)
    return hc_norm_reference(x, eps)


def hc_pre(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rounds: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sublayer's input [T, N] in the dtype of `x` [T, S, N]; expand [T, S] and mix [T, S from, S to], both float32.

    Streams are weighed by `sigmoid + eps` and added in float32; expand is `2 * sigmoid`; mix is a softmax over what a stream
    goes to, plus `eps`, whose columns and rows are then divided by their sums plus `eps` in turn, `2 * rounds - 1` times.
    `x` may be strided, and its streams one tensor.

    Raises:
        ValueError: shapes or dtypes do not fit, or no round.
    """
    _check_streams(x)
    _check_coefficients(x, x.shape[1] * (x.shape[1] + 2), projected, scale, base)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; balancing takes at least 1.")
    if uses_triton(x) and x.stride(2) == 1:
        from transom_kernels.hyper_connections.gpu import hc_pre_triton

        return hc_pre_triton(x, projected, scale, base, rounds=rounds, eps=eps)
    return hc_pre_reference(x, projected, scale, base, rounds=rounds, eps=eps)


def hc_head(
    x: torch.Tensor, projected: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The streams as one [T, N], as `hc_pre` collapses them, where there is no sublayer behind.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_streams(x)
    _check_coefficients(x, x.shape[1], projected, scale, base)
    if uses_triton(x) and x.stride(2) == 1:
        from transom_kernels.hyper_connections.gpu import hc_head_triton

        return hc_head_triton(x, projected, scale, base, eps=eps)
    return hc_head_reference(x, projected, scale, base, eps=eps)


def hc_post(y: torch.Tensor, x: torch.Tensor, expand: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """`mix^T x + expand * y` [T, S, N]: the streams behind a sublayer that made `y` [T, N] of the streams `x` [T, S, N].

    `expand` and `mix` are `hc_pre`'s and are rounded to the dtype of `x` first. The mixed streams are rounded, and
    their sums with the weighed output once more.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_streams(x)
    tokens, size, width = x.shape
    shapes = [tuple(part.shape) for part in (y, expand, mix)]
    if shapes != [(tokens, width), (tokens, size), (tokens, size, size)] or y.dtype != x.dtype:
        raise ValueError(
            f"y {shapes[0]} {y.dtype}, expand {shapes[1]} and mix {shapes[2]} do not fit streams {tuple(x.shape)} {x.dtype}; "
            "give [T, N] of the same dtype, [T, S] and [T, S, S]."
        )
    if uses_triton(x) and x.stride(2) == 1 and y.stride(1) == 1:
        from transom_kernels.hyper_connections.gpu import hc_post_triton

        return hc_post_triton(y, x, expand, mix)
    return hc_post_reference(y, x, expand, mix)


def _check_streams(x: torch.Tensor) -> None:
    if x.dim() != 3 or not x.shape[1] or not x.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} has no streams; give [tokens, streams, width].")


def _check_coefficients(x: torch.Tensor, size: int, *parts: torch.Tensor) -> None:
    """`parts` are the projected coefficients, their scale and base."""
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(len(x), size), (size,), (size,)]:
        raise ValueError(
            f"projected, scale, base {shapes} do not fit streams {tuple(x.shape)}: there are {size} coefficients."
        )
    if any(part.dtype != torch.float32 for part in parts):
        raise ValueError(f"projected, scale, base are {[part.dtype for part in parts]}; coefficients are float32.")
