"""The CPU kernels of `linear` over quantised weights against the reference, and the packing of weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.test_small_operators_cpu import strided
from transom_kernels.launch import prefer, uses_cpu_kernels
from transom_kernels.linear import gated_linear, linear
from transom_kernels.quantised_linear import Format, concatenated, pack, pack_gated, quantise

FORMATS: list[Format] = ["int8", "int8_min", "int4", "int4_min"]
# one row, blocks of all sizes, and more than one item's rows; widths and columns at, below and above groups and panels
SHAPES = [(1, 32, 16), (3, 31, 15), (7, 33, 17), (13, 1, 1), (67, 70, 50)]


def in_torch(operator: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    with prefer("reference"):
        return operator(*arguments, **options)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the order of float32 roundings; one step of bfloat16 where that changes its rounding."""
    exact = got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-5 if exact else 2**-7, atol=2e-5)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("int8", torch.float32),
        ("int8", torch.bfloat16),
        ("int8_min", torch.float32),
        ("int4", torch.float32),
        ("int4_min", torch.float32),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_the_reference(format, dtype, shape):
    rows, width, columns = shape
    levels, bias = quantise(torch.randn(columns, width), format), torch.randn(columns)
    x, residual = strided(rows, width, dtype), strided(rows, columns, dtype)
    assert uses_cpu_kernels(x)
    for weight, added in ((pack(levels), None), (pack(levels, bias), residual)):
        got = linear(x, weight, added)
        assert got.dtype == dtype
        assert_close(got, in_torch(linear, x, weight, added))


@pytest.mark.parametrize("format", FORMATS)
def test_integers_are_exact(format):
    """Inputs whose scales are powers of two leave nothing to be rounded: the extreme levels, which saturate in 16 bits, too."""
    levels = {"int8": (-127, 128), "int8_min": (0, 256), "int4": (-8, 8), "int4_min": (0, 16)}[format]
    weight = torch.randint(*levels, (40, 160)).float()
    weight[:, ::32] = levels[0]
    weight[:, 1::32] = levels[1] - 1
    rows = quantise(weight, format)
    assert rows.dequantised().equal(weight)
    x = torch.randint(-127, 128, (11, 160)).float()
    x[:, ::32] = 127
    x[2], x[3, :80] = 127, -127
    assert linear(x, pack(rows)).equal((x.double() @ weight.T.double()).float())


@pytest.mark.parametrize(("format", "activation"), [("int8_min", "silu"), ("int4_min", "gelu_tanh")])
def test_gated_weights(format, activation):
    gate, up = (quantise(part, format) for part in torch.randn(2, 37, 70) / 4)
    x, biases = torch.randn(5, 70).bfloat16(), (torch.randn(37), torch.randn(37))
    for weight in (pack_gated(gate, up), pack_gated(gate, up, biases)):
        got = gated_linear(x, weight, activation)
        assert_close(got, in_torch(gated_linear, x, weight, activation))


def test_logits():
    x, weight = torch.randn(6, 64).bfloat16(), pack(quantise(torch.randn(50, 64), "int8"))
    for scale, cap in ((1.0, None), (0.3, None), (1.0, 5.0), (0.3, 5.0)):
        got = linear(x, weight, scale=scale, soft_cap=cap, out_dtype=torch.float32)
        assert_close(got, in_torch(linear, x, weight, scale=scale, soft_cap=cap, out_dtype=torch.float32))


def test_zeros_and_tiny_numbers_give_zeros():
    for weight in (torch.zeros(20, 40), torch.randn(20, 40)):
        for x in (torch.zeros(2, 40), torch.full((2, 40), 1e-38)):
            for format in FORMATS:
                assert not linear(x, pack(quantise(weight, format))).any()


def test_weights_that_differ_are_refused():
    rows = quantise(torch.randn(20, 40), "int8")
    with pytest.raises(ValueError, match="alike"):
        pack_gated(rows, quantise(torch.randn(19, 40), "int8"))
    with pytest.raises(ValueError, match="concatenated"):
        concatenated([rows, quantise(torch.randn(20, 40), "int4")])


# --- weights


@pytest.mark.parametrize(
    ("format", "limit"), [("int8", 0.006), ("int8_min", 0.005), ("int4", 0.09), ("int4_min", 0.08)]
)
def test_rounding_a_weight(format, limit):
    weight = torch.randn(50, 70)
    weight[7] = 0
    rows = quantise(weight, format)
    assert (rows.dequantised() - weight).norm() / weight.norm() < limit
    assert rows.dequantised()[7].equal(weight[7])


@pytest.mark.parametrize("format", FORMATS)
def test_packing_keeps_rows(format):
    first, other = quantise(torch.randn(50, 70), format), quantise(torch.randn(50, 70), format)
    both = concatenated([first, other])
    (unpacked,) = pack(both).unpacked()
    assert unpacked.dequantised().equal(torch.cat([first.dequantised(), other.dequantised()]))
    for rows, wanted in zip(pack_gated(first, other).unpacked(), (first, other), strict=True):
        assert rows.dequantised().equal(wanted.dequantised())


def test_bytes_in_memory():
    weight = torch.randn(64, 64)
    sizes = [pack(quantise(weight, format)).nbytes * 8 / weight.numel() for format in FORMATS]
    assert sizes == [8.5, 9.0, 4.5, 5.0]


# --- checked, and on other processors


def small_case() -> None:
    torch.manual_seed(0)
    for format in FORMATS[::3]:
        rows = quantise(torch.randn(21, 70), format)
        for x in (torch.randn(3, 70), torch.randn(9, 70)):
            assert_close(linear(x, pack(rows)), in_torch(linear, x, pack(rows)))
        test_integers_are_exact(format)
    assert uses_cpu_kernels(x)
