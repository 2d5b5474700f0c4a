"""The CPU kernels of RoPE against the reference: odd widths, strides, far positions, batches, threads."""

from __future__ import annotations

import pytest
import torch

from tests.matrices import matrix, some_daily
from transom_kernels.launch import prefer, uses_cpu_kernels
from transom_kernels.rotary import rotary_, rotary_tables
from transom_kernels.rotary.cpu import heads_fit, tables_fit
from transom_kernels.rotary.op import rotary_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def compare(dtype: torch.dtype, interleaved: bool, width: int, table_heads: int = 1) -> None:
    wide = torch.randn(5, 6, width + 7).to(dtype)
    x, before = wide[:, 1:5, 3:], wide.clone()
    cos, sin = (torch.randn(5, table_heads, width).to(dtype) for _ in range(2))
    assert uses_cpu_kernels(x)
    assert heads_fit(x, cos, sin)
    wanted = rotary_reference(x.float(), cos.float(), sin.float(), interleaved=interleaved).to(dtype)
    rotary_(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(x, wanted, rtol=LIMIT[dtype], atol=1e-6)
    before[:, 1:5, 3 : width + 3] = x[..., :width]
    assert wide.equal(before)


VARIANTS = [(dtype, interleaved) for dtype in DTYPES for interleaved in (False, True)]
DAILY = [(torch.float32, True), (torch.bfloat16, False), (torch.float32, False)]


@pytest.mark.parametrize(("dtype", "interleaved"), some_daily(VARIANTS, DAILY))
@pytest.mark.parametrize("width", [2, 14, 16, 18, 32, 34, 64])
def test_rotation(dtype, interleaved, width):
    compare(dtype, interleaved, width)


def test_tables_of_each_head():
    compare(torch.float32, False, 20, table_heads=4)


@pytest.mark.parametrize(("dtype", "width", "scale"), matrix(DTYPES[:2], [2, 16, 34, 128], [1.0, 1.3]))
def test_tables(dtype, width, scale):
    positions = torch.tensor([0, 1, 2, 77, 4095, 8191, 131_071, 1_048_575, 10_000_000])
    frequency = 10_000.0 ** -torch.linspace(0, 1, width)
    sign = torch.randn(width).sign()
    assert tables_fit(positions, frequency, sign, dtype)
    got = rotary_tables(positions, frequency, sign, dtype, scale)
    with prefer("reference"):
        wanted = rotary_tables(positions, frequency, sign, torch.float32, scale)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == dtype
        assert one.shape == (9, 1, width)
        limit = {"rtol": 0.0, "atol": 2e-7} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
        torch.testing.assert_close(one.float(), other, **limit)  # type: ignore[arg-type]


def test_cosine_and_sine_are_exact_to_the_last_bit_but_one():
    positions, ones = torch.arange(1 << 16), torch.ones(1)
    cos, sin = rotary_tables(positions, ones, ones, torch.float32)
    for got, wanted in ((cos, positions.double().cos()), (sin, positions.double().sin())):
        assert float((got.flatten().double() - wanted).abs().max()) < 1.2e-7


def test_pairs_are_turned():
    angle = torch.tensor(0.3)
    x = torch.randn(1, 1, 4)
    turned = torch.view_as_real(torch.complex(x[0, 0, :2], x[0, 0, 2:]) * torch.exp(1j * angle)).T.flatten()
    sin = angle.sin() * torch.tensor([[[-1.0, -1.0, 1.0, 1.0]]])
    rotary_(x, angle.cos().expand(1, 1, 4), sin)
    torch.testing.assert_close(x[0, 0], turned)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="odd"):
        rotary_(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match="needs tables"):
        rotary_(torch.zeros(2, 1, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))


def small_case() -> None:
    for dtype, interleaved in DAILY[:2]:
        compare(dtype, interleaved, 22)
        rotary_tables(torch.arange(3), torch.rand(22), torch.ones(22), dtype)
