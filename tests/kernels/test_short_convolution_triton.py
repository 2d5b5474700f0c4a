"""The Triton kernel of the gated short convolution, in the interpreter (or on a GPU where there is one)."""

import pytest
import torch

from tests.kernels.test_short_convolution import check, convolution_case
from tests.matrices import matrix
from transom_kernels.short_convolution import gpu
from transom_kernels.short_convolution.gpu import short_convolution_triton


@pytest.mark.parametrize(
    ("length", "width", "bias", "dtype"),
    matrix([1, 3, 4], [16, 5], [True, False], [torch.float32, torch.bfloat16, torch.float16]),
)
def test_against_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, length: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gpu, "BLOCK_SEQUENCES", 4)  # fewer than sequences
    monkeypatch.setattr(gpu, "BLOCK_CHANNELS", 32)
    check(*convolution_case(length, width, bias=bias, dtype=dtype), short_convolution_triton)
