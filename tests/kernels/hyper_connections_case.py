"""What the tests of the hyper-connections' CPU and Triton kernels share."""

from __future__ import annotations

import torch

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # Triton's interpreter cuts bfloat16 off
EPS = 1e-6
Sizes = tuple[int, int, int]


def streams_of(sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """Strided, as nothing promises otherwise; its neighbours are NaN."""
    tokens, size, width = sizes
    wide = torch.full((tokens, size + 1, width + 3), float("nan"), dtype=dtype)
    wide[:, 1:, 2:-1] = torch.randn(tokens, size, width).to(dtype)
    return wide[:, 1:, 2:-1]


def coefficients(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return 4 * torch.randn(tokens, size), torch.rand(size) + 0.5, torch.randn(size)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    limit = LIMIT[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=limit)
