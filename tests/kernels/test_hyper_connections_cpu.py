"""Hyper-connections on CPUs: the operators against their reference, what the mixing matrix is, and wrong arguments.

`test_small_operators_triton` compares the Triton kernels by `check_operators`.
"""

from types import ModuleType, SimpleNamespace

import pytest
import torch

from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre, op

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


def check_operators(kernels: ModuleType | SimpleNamespace, x: torch.Tensor, *, rounds: int) -> None:
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


X, Y = torch.ones(2, 3, 4), torch.ones(2, 4)

pytestmark = pytest.mark.usefixtures("memory_full_of_nan")


def check(x: torch.Tensor) -> None:
    """The operator that has a kernel of its own."""
    close(hc_norm(x, EPS), op.hc_norm_reference(x, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (5, 4, 518), (3, 17, 17)], ids=str)
def test_sizes(dtype: torch.dtype, sizes: Sizes) -> None:
    check(streams_of(sizes, dtype))


def test_streams_that_are_one_tensor_still() -> None:
    check(torch.randn(3, 1, 40).expand(-1, 4, -1))


def test_a_balanced_mix_neither_grows_nor_shrinks_the_streams() -> None:
    parts = torch.randn(2, 15), torch.ones(15), torch.zeros(15)
    _, _, mix = hc_pre(torch.randn(2, 3, 4), *parts, rounds=20, eps=1e-6)
    for dim in (1, 2):
        torch.testing.assert_close(mix.sum(dim), torch.ones(2, 3), atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    good = torch.zeros(2, 15), torch.zeros(15), torch.zeros(15)
    post, mix = torch.zeros(2, 3), torch.zeros(2, 3, 3)
    for call, words in (
        (lambda: hc_pre(X, torch.zeros(2, 14), *good[1:], rounds=1, eps=EPS), "there are 15 coefficients"),
        (lambda: hc_head(X, *good, eps=EPS), "there are 3 coefficients"),
        (lambda: hc_pre(X, good[0].half(), *good[1:], rounds=1, eps=EPS), "coefficients are float32"),
        (lambda: hc_pre(X, *good, rounds=0, eps=EPS), "at least 1"),
        (lambda: hc_norm(Y, EPS), r"give \[tokens, streams, width\]"),
        (lambda: hc_post(Y.half(), X, post, mix), "of the same dtype"),
        (lambda: hc_post(Y[:1], X, post, mix), "of the same dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def small_case() -> None:
    check(streams_of((3, 3, 35), torch.bfloat16))
