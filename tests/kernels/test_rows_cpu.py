"""The CPU kernels of `layer_norm` and `position_scale` against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.layer_norm import cpu as layer_norm_kernel
from transom_kernels.layer_norm import layer_norm
from transom_kernels.layer_norm.op import layer_norm_reference
from transom_kernels.position_scale import cpu as position_scale_kernel
from transom_kernels.position_scale import position_scale
from transom_kernels.position_scale.op import position_scale_reference

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]


def limit(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 3e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}


def compare_layer_norm(dtype: torch.dtype, width: int) -> None:
    wide = torch.full((5, width + 5), float("nan")).to(dtype)
    x, weight = wide[:, 2 : width + 2], torch.randn(width).to(dtype)
    x.copy_(torch.randn(5, width) + 3)
    assert uses_cpu_kernels(x)
    assert layer_norm_kernel.fits_cpu(x, weight)
    torch.testing.assert_close(layer_norm(x, weight, EPS), layer_norm_reference(x, weight, EPS), **limit(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 15, 16, 17, 33, 576])
def test_layer_norm(dtype, width):
    compare_layer_norm(dtype, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interval", [1, 7, 8192])
def test_position_scale(dtype, interval):
    positions = torch.cat(
        [torch.arange(3 * position_scale_kernel.ITEM_TOKENS + 1), torch.tensor([8190, 8191, 8192, 131_071, 9_999_999])]
    )
    assert position_scale_kernel.fits_cpu(positions, dtype)
    got = position_scale(positions, factor=0.1, interval=interval, dtype=dtype)
    wanted = position_scale_reference(positions, factor=0.1, interval=interval, dtype=dtype)
    torch.testing.assert_close(got, wanted, rtol=2e-7 if dtype == torch.float32 else 2**-7, atol=0)
    with pytest.raises(ValueError, match="at least 1"):
        position_scale(positions, factor=0.1, interval=0, dtype=dtype)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="does not fit"):
        layer_norm(torch.zeros(2, 5), torch.zeros(4), EPS)


def small_case() -> None:
    for dtype in DTYPES:
        compare_layer_norm(dtype, 37)
        position_scale(torch.arange(3), factor=0.1, interval=2, dtype=dtype)
