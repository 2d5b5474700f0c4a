"""The hyper-connection kernels against their reference, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.hyper_connections_case import SIZES, Sizes, check, streams_of
from tests.matrices import matrix
from transom_kernels.hyper_connections.gpu import hc_head_triton, hc_norm_triton, hc_post_triton, hc_pre_triton

pytestmark = pytest.mark.usefixtures("memory_full_of_nan")


def check_kernels(x: torch.Tensor, *, rounds: int) -> None:
    kernels = {"hc_norm": hc_norm_triton, "hc_pre": hc_pre_triton, "hc_head": hc_head_triton, "hc_post": hc_post_triton}
    check(SimpleNamespace(**kernels), x, rounds=rounds)


@pytest.mark.parametrize(
    ("sizes", "dtype", "rounds"), matrix(SIZES, [torch.float32, torch.bfloat16, torch.float16], [1, 20])
)
def test_sizes(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    torch.manual_seed(5)
    check_kernels(streams_of(sizes, dtype), rounds=rounds)


def test_streams_that_are_one_tensor_still() -> None:
    torch.manual_seed(5)
    check_kernels(torch.randn(3, 1, 40).expand(-1, 4, -1), rounds=5)
