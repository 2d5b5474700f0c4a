"""The CPU kernel of `rms_norm` against the reference: odd widths, strides, sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.row_case import strided
from tests.matrices import some_daily
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.rms_norm import rms_norm
from transom_kernels.rms_norm.cpu import rows_fit
from transom_kernels.rms_norm.op import rms_norm_reference

EPS = 1e-5
DAILY = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
PAIRS = some_daily([*DAILY, (torch.bfloat16, torch.float32), (torch.float16, torch.float16)], DAILY)
WIDTHS = [1, 15, 16, 17, 32, 33, 576]


def limit(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype], "atol": 1e-6}


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows(dtype, weight_dtype, width):
    x, weight = strided(5, width, dtype), torch.randn(width).to(weight_dtype)
    assert uses_cpu_kernels(x)
    assert rows_fit(x, weight, None, None)
    out, same = rms_norm(x, weight, EPS)
    assert same is x
    torch.testing.assert_close(out, rms_norm_reference(x, weight, EPS), **limit(dtype))


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums(dtype, weight_dtype, width):
    x, residual = strided(5, width, dtype), strided(5, width, dtype)
    inner, weight = torch.randn(width).to(weight_dtype), torch.randn(width).to(weight_dtype)
    out, total = rms_norm(x, weight, EPS, residual)
    assert total.equal(residual + x)
    assert out.equal(rms_norm(total, weight, EPS)[0])
    out, total = rms_norm(x, weight, EPS, residual, inner=inner, factor=0.3)
    assert total.equal((residual + rms_norm(x, inner, EPS)[0]) * 0.3)
    assert out.equal(rms_norm(total, weight, EPS)[0])
    same, total = rms_norm(x, None, EPS, residual)
    assert same is total
    assert total.equal(residual + x)


def test_more_dimensions():
    x, weight = torch.randn(3, 4, 20), torch.randn(20)
    torch.testing.assert_close(rms_norm(x, weight, EPS)[0], rms_norm_reference(x, weight, EPS))
    turned = x.transpose(0, 1)
    assert not rows_fit(turned, weight, None, None)
    torch.testing.assert_close(rms_norm(turned, weight, EPS)[0], rms_norm_reference(turned, weight, EPS))


def test_a_wide_weight_is_multiplied_before_rounding():
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(16)
    assert rms_norm(x, weight, EPS)[0].equal(rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("parts", [{"weight": None}, {"inner": torch.ones(4)}, {"factor": 2.0}], ids=str)
def test_parts_of_a_sum_need_a_residual(parts):
    with pytest.raises(ValueError, match="give a residual"):
        rms_norm(torch.zeros(2, 4), **({"weight": torch.ones(4), "eps": EPS} | parts))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(torch.zeros(2, 4), torch.ones(3), EPS)


def small_case() -> None:
    for dtype, weight_dtype in DAILY:
        x, weight = torch.randn(3, 37).to(dtype), torch.randn(37).to(weight_dtype)
        out, total = rms_norm(x, weight, EPS, x, inner=weight)
        torch.testing.assert_close(out, rms_norm_reference(total, weight, EPS), **limit(dtype))
    assert uses_cpu_kernels(x)
