"""Streams and coefficients of hyper-connections, and the comparison of an implementation of all operators with the reference."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch

from transom_kernels.hyper_connections import op

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # Triton's interpreter cuts bfloat16 off
EPS = 1e-6
Sizes = tuple[int, int, int]
SIZES = [(0, 4, 8), (1, 1, 1), (5, 3, 7), (1, 4, 64), (5, 4, 1030), (2, 5, 33), (3, 4, 1)]


def streams_of(sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """Strided, as nothing promises otherwise; its neighbours are NaN."""
    tokens, size, width = sizes
    wide = torch.full((tokens, size + 1, width + 3), float("nan"), dtype=dtype)
    wide[:, 1:, 2:-1] = torch.randn(tokens, size, width).to(dtype)
    return wide[:, 1:, 2:-1]


def check(kernels: ModuleType | SimpleNamespace, x: torch.Tensor, *, rounds: int) -> None:
    """`kernels` has `hc_norm`, `hc_pre`, `hc_head` and `hc_post`."""
    tokens, size, width = x.shape
    close(kernels.hc_norm(x, EPS), op.hc_norm_reference(x, EPS))
    parts = coefficients(tokens, size * (size + 2))
    wanted = op.hc_pre_reference(x, *parts, rounds=rounds, eps=EPS)
    for got, want in zip(kernels.hc_pre(x, *parts, rounds=rounds, eps=EPS), wanted, strict=True):
        close(got, want)
    parts = coefficients(tokens, size)
    close(kernels.hc_head(x, *parts, eps=EPS), op.hc_head_reference(x, *parts, eps=EPS))
    y = torch.randn(tokens, width + 2).to(x.dtype)[:, 1:-1]
    post, mix = 2 * torch.rand(tokens, size), torch.rand(tokens, size, size).softmax(2)
    close(kernels.hc_post(y, x, post, mix), op.hc_post_reference(y, x, post, mix))


def coefficients(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return 4 * torch.randn(tokens, size), torch.rand(size) + 0.5, torch.randn(size)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    limit = LIMIT[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=limit)
