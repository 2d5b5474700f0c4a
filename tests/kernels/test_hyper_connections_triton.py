"""The hyper-connection kernels against their reference, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.hyper_connections_case import EPS, Sizes, close, coefficients, streams_of
from transom_kernels.hyper_connections.gpu import (
    hc_head_triton,
    hc_norm_triton,
    hc_post_triton,
    hc_pre_triton,
)
from transom_kernels.hyper_connections.op import (
    hc_head_reference,
    hc_norm_reference,
    hc_post_reference,
    hc_pre_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(0, 4, 8), (1, 1, 1), (5, 3, 7), (1, 4, 64), (5, 4, 1030), (2, 5, 33), (3, 4, 1)]

pytestmark = [
    pytest.mark.usefixtures("memory_full_of_nan"),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes))),
]


@pytest.fixture(autouse=True)
def same_inputs() -> None:
    torch.manual_seed(5)


def test_normalised(dtype: torch.dtype, sizes: Sizes) -> None:
    x = streams_of(sizes, dtype)
    close(hc_norm_triton(x, EPS), hc_norm_reference(x, EPS))


@pytest.mark.parametrize("rounds", [1, 20])
def test_collapsed(dtype: torch.dtype, sizes: Sizes, rounds: int) -> None:
    x, size = streams_of(sizes, dtype), sizes[1]
    parts = coefficients(len(x), size * (size + 2))
    wanted = hc_pre_reference(x, *parts, rounds=rounds, eps=EPS)
    for got, want in zip(hc_pre_triton(x, *parts, rounds=rounds, eps=EPS), wanted, strict=True):
        close(got, want)


def test_merged(dtype: torch.dtype, sizes: Sizes) -> None:
    x = streams_of(sizes, dtype)
    parts = coefficients(len(x), sizes[1])
    close(hc_head_triton(x, *parts, eps=EPS), hc_head_reference(x, *parts, eps=EPS))


def test_expanded(dtype: torch.dtype, sizes: Sizes) -> None:
    tokens, size, width = sizes
    x, y = streams_of(sizes, dtype), torch.randn(tokens, width + 2).to(dtype)[:, 1:-1]
    expand, mix = 2 * torch.rand(tokens, size), torch.rand(tokens, size, size).softmax(2)
    close(hc_post_triton(y, x, expand, mix), hc_post_reference(y, x, expand, mix))


def test_streams_that_are_one_tensor_still(dtype: torch.dtype, sizes: Sizes) -> None:
    tokens, size, width = sizes
    x, y = torch.randn(tokens, 1, width).to(dtype).expand(-1, size, -1), torch.randn(tokens, width).to(dtype)
    parts = coefficients(tokens, size * (size + 2))
    close(hc_norm_triton(x, EPS), hc_norm_reference(x, EPS))
    collapsed, expand, mix = hc_pre_triton(x, *parts, rounds=5, eps=EPS)
    close(collapsed, hc_pre_reference(x, *parts, rounds=5, eps=EPS)[0])
    close(hc_post_triton(y, x, expand, mix), hc_post_reference(y, x, expand, mix))
