"""Hyper-connections on CPUs: the kernels against their reference, what the mixing matrix is, and wrong arguments."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import hyper_connections_case
from tests.kernels.hyper_connections_case import EPS, SIZES, Sizes, close, streams_of
from transom_kernels import hyper_connections
from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre, hc_project
from transom_kernels.hyper_connections.cpu import CHUNK
from transom_kernels.hyper_connections.op import hc_project_reference

X, Y = torch.ones(2, 3, 4), torch.ones(2, 4)

pytestmark = pytest.mark.usefixtures("memory_full_of_nan")


def check(x: torch.Tensor, *, rounds: int) -> None:
    hyper_connections_case.check(hyper_connections, x, rounds=rounds)
    columns = x.shape[1] * x.shape[2]
    weight = torch.randn(x.shape[1] * (x.shape[1] + 2), columns) / columns**0.5
    close(hc_project(x, weight, EPS), hc_project_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (5, 4, CHUNK + 6), (3, 16, 17)], ids=str)
def test_sizes(dtype: torch.dtype, sizes: Sizes) -> None:
    for rounds in (1, 20):
        check(streams_of(sizes, dtype), rounds=rounds)


def test_streams_that_are_one_tensor_still() -> None:
    check(torch.randn(3, 1, 40).expand(-1, 4, -1), rounds=3)


def test_many_streams_are_computed_by_torch() -> None:
    check(torch.randn(2, 17, 5), rounds=3)


def test_a_balanced_mix_neither_grows_nor_shrinks_the_streams() -> None:
    torch.manual_seed(0)
    parts = torch.randn(2, 15), torch.ones(15), torch.zeros(15)
    _, _, mix = hc_pre(torch.randn(2, 3, 4), *parts, rounds=20, eps=1e-6)
    for dim in (1, 2):
        torch.testing.assert_close(mix.sum(dim), torch.ones(2, 3), atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    good = torch.zeros(2, 15), torch.zeros(15), torch.zeros(15)
    with pytest.raises(ValueError, match="there are 15 coefficients"):
        hc_pre(X, torch.zeros(2, 14), *good[1:], rounds=1, eps=1e-6)
    with pytest.raises(ValueError, match="there are 3 coefficients"):
        hc_head(X, *good, eps=1e-6)
    with pytest.raises(ValueError, match="coefficients are float32"):
        hc_pre(X, good[0].half(), *good[1:], rounds=1, eps=1e-6)
    with pytest.raises(ValueError, match="at least 1"):
        hc_pre(X, *good, rounds=0, eps=1e-6)
    with pytest.raises(ValueError, match="give \\[tokens, streams, width\\]"):
        hc_norm(Y, 1e-6)
    with pytest.raises(ValueError, match=r"give \[M, S \* N\]"):
        hc_project(X, torch.zeros(5, 11), 1e-6)
    for y in (Y.half(), Y[:1]):
        with pytest.raises(ValueError, match="of the same dtype"):
            hc_post(y, X, torch.zeros(2, 3), torch.zeros(2, 3, 3))


def small_case() -> None:
    check(streams_of((3, 3, 35), torch.bfloat16), rounds=2)
