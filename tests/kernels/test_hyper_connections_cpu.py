"""The hyper-connections' CPU kernels against their reference."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.hyper_connections_case import EPS, Sizes, close, coefficients, streams_of
from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre, hc_project
from transom_kernels.hyper_connections.cpu import CHUNK
from transom_kernels.hyper_connections.op import (
    hc_head_reference,
    hc_norm_reference,
    hc_post_reference,
    hc_pre_reference,
    hc_project_reference,
)

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(0, 4, 8), (1, 1, 1), (5, 3, 7), (1, 4, 64), (5, 4, CHUNK + 6), (2, 5, 33), (3, 16, 17)]

pytestmark = pytest.mark.usefixtures("memory_full_of_nan")


def check(x: torch.Tensor, *, rounds: int) -> None:
    tokens, size, width = x.shape
    close(hc_norm(x, EPS), hc_norm_reference(x, EPS))
    weight = torch.randn(size * (size + 2), size * width) / (size * width) ** 0.5
    close(hc_project(x, weight, EPS), hc_project_reference(x, weight, EPS))
    parts = coefficients(tokens, size * (size + 2))
    wanted = hc_pre_reference(x, *parts, rounds=rounds, eps=EPS)
    for got, want in zip(hc_pre(x, *parts, rounds=rounds, eps=EPS), wanted, strict=True):
        close(got, want)
    parts = coefficients(tokens, size)
    close(hc_head(x, *parts, eps=EPS), hc_head_reference(x, *parts, eps=EPS))
    y = torch.randn(tokens, width + 2).to(x.dtype)[:, 1:-1]
    post, mix = 2 * torch.rand(tokens, size), torch.rand(tokens, size, size).softmax(2)
    close(hc_post(y, x, post, mix), hc_post_reference(y, x, post, mix))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_sizes(dtype: torch.dtype, sizes: Sizes) -> None:
    for rounds in (1, 20):
        check(streams_of(sizes, dtype), rounds=rounds)


def test_streams_that_are_one_tensor_still() -> None:
    check(torch.randn(3, 1, 40).expand(-1, 4, -1), rounds=3)


def test_many_streams_are_computed_by_torch() -> None:
    check(torch.randn(2, 17, 5), rounds=3)


def everything(
    x: torch.Tensor, parts: tuple[torch.Tensor, ...], y: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    projected = hc_project(x, weight, EPS)
    hidden, post, mix = hc_pre(x, projected, *parts, rounds=20, eps=EPS)
    head = hc_head(x, projected[:, :4].contiguous(), parts[0][:4], parts[1][:4], eps=EPS)
    return [hc_norm(x, EPS), projected, hidden, post, mix, hc_post(y, x, post, mix), head]


def test_a_token_does_not_depend_on_the_others_or_on_the_threads() -> None:
    x, y, weight = torch.randn(6, 4, 70).bfloat16(), torch.randn(6, 70).bfloat16(), torch.randn(24, 280) / 17
    parts = torch.rand(24), torch.randn(24)
    whole = everything(x, parts, y, weight)
    for row in (0, 3, 5):
        at = slice(row, row + 1)
        for alone, every in zip(everything(x[at], parts, y[at], weight), whole, strict=True):
            assert torch.equal(alone, every[at])
    for num_threads in (1, 3):
        with kernel_threads(num_threads):
            for again, every in zip(everything(x, parts, y, weight), whole, strict=True):
                assert torch.equal(again, every)


def test_a_token_of_nan_stays_alone() -> None:
    x, y, weight = torch.randn(3, 4, 70), torch.randn(3, 70), torch.randn(24, 280) / 17
    parts = torch.rand(24), torch.randn(24)
    good = everything(x, parts, y, weight)
    x[1, 2, 3] = float("nan")
    for got, want in zip(everything(x, parts, y, weight), good, strict=True):
        assert bool(got[1].isnan().any())
        assert torch.equal(got[[0, 2]], want[[0, 2]])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give \[M, S \* N\]"):
        hc_project(torch.zeros(2, 3, 4), torch.zeros(5, 11), EPS)


def small_case() -> None:
    check(streams_of((3, 3, 35), torch.bfloat16), rounds=2)
