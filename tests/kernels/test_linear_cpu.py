"""The CPU kernels of linear layers and of the embedding against the reference: odd shapes, strides, threads, processors. Those of
`linear` over quantised weights, and the packing of weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.test_small_operators_cpu import limit, strided
from tests.matrices import some_daily
from transom_kernels.cpu.kernel import cpu_kernel, object_code
from transom_kernels.cpu.target import CpuTarget
from transom_kernels.launch import prefer, uses_cpu_kernels
from transom_kernels.linear import embedding_rows, gated_linear, heads_linear, linear, pack_weight
from transom_kernels.linear.op import embedding_rows_reference, gated_linear_reference, linear_reference
from transom_kernels.quantised_linear import Format, concatenated, pack, pack_gated, quantise

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# M, K, N: one row, odd widths, tiles that are full, one more and one less, several chunks of K and several blocks of rows
SHAPES = [(1, 1, 1), (3, 17, 5), (15, 32, 16), (16, 64, 31), (17, 66, 33), (33, 1100, 48), (70, 96, 7), (300, 600, 40)]
FORMATS: list[Format] = ["int8", "int8_min", "int4", "int4_min"]
# one row, blocks of all sizes, and more than one item's rows; widths and columns at, below and above groups and panels
QUANTISED_SHAPES = [(1, 32, 16), (3, 31, 15), (7, 33, 17), (13, 1, 1), (67, 70, 50)]


def matrices(rows: int, width: int, dtype: torch.dtype, *, count: int = 1) -> list[torch.Tensor]:
    return [(torch.randn(rows, width) / width**0.5).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", some_daily(DTYPES, DTYPES[:2]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(dtype, shape):
    rows, width, outputs = shape
    (weight,) = matrices(outputs, width, dtype)
    x, bias, residual = strided(rows, width, dtype), torch.randn(outputs).to(dtype), strided(rows, outputs, dtype)
    assert uses_cpu_kernels(x)
    packed, biased = pack_weight(weight), pack_weight(weight, bias)
    torch.testing.assert_close(linear(x, packed), linear_reference(x, weight), **limit(dtype))
    wanted = linear_reference(x, weight, bias.float(), residual)
    torch.testing.assert_close(linear(x, biased, residual), wanted, **limit(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_long_rows_come_in_chunks(dtype):
    test_linear(dtype, (300, 4100, 1290))


GATED = [(dtype, activation) for dtype in DTYPES[:2] for activation in ("silu", "gelu_tanh")]


@pytest.mark.parametrize(
    ("dtype", "activation"), some_daily(GATED, [(torch.bfloat16, "silu"), (torch.float32, "gelu_tanh")])
)
def test_gated(dtype, activation):
    for rows, width, inner in ((1, 24, 32), (5, 33, 17), (40, 96, 48)):
        (gate, up), x = matrices(inner, width, dtype, count=2), strided(rows, width, dtype) * 3
        biases = torch.randn(inner).to(dtype), torch.randn(inner).to(dtype)
        plain, biased = pack_weight(gate, up=up), pack_weight(gate, biases[0], up=up, up_bias=biases[1])
        wanted = gated_linear_reference(x, gate, up, activation=activation)
        torch.testing.assert_close(gated_linear(x, plain, activation), wanted, **limit(dtype))
        wanted = gated_linear_reference(x, gate, up, (biases[0].float(), biases[1].float()), activation=activation)
        got = gated_linear(x, biased, activation)
        torch.testing.assert_close(got, wanted, **limit(dtype))
        assert gated_linear(x[-1:], biased, activation).equal(got[-1:])


@pytest.mark.parametrize("dtype", some_daily(DTYPES, DTYPES[:2]))
def test_each_head_has_its_matrix(dtype):
    weights, x = matrices(37, 40, dtype, count=3), strided(5 * 3, 40, dtype).view(5, 3, 40)
    packed = [pack_weight(weight) for weight in weights]
    got = heads_linear(x, packed)
    wanted = torch.stack([linear_reference(x[:, head], weight) for head, weight in enumerate(weights)], dim=1)
    torch.testing.assert_close(got, wanted, **limit(dtype))
    assert heads_linear(x[-1:], packed).equal(got[-1:])


def test_logits_in_float32():
    (weight,), x = matrices(37, 40, torch.bfloat16), torch.randn(5, 40).bfloat16()
    how: dict[str, Any] = {"scale": 3.0, "soft_cap": 2.0, "out_dtype": torch.float32}
    got, wanted = linear(x, pack_weight(weight), **how), linear_reference(x, weight, **how)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", some_daily(DTYPES, DTYPES[:2]))
@pytest.mark.parametrize("width", [1, 16, 33, 576])
def test_embedding(dtype, width):
    table, ids = torch.randn(37, width).to(dtype), torch.tensor([0, 36, 15, 16, 16, 31, 5, 4, 45])
    for tables in (table, pack_weight(table)):
        assert embedding_rows(ids[:-1], tables).equal(F.embedding(ids[:-1], table))
        wanted = embedding_rows_reference(ids, table, first_id=5, scale=1.7)
        assert embedding_rows(ids, tables, first_id=5, scale=1.7).equal(wanted)
    assert embedding_rows(ids[:0], table).shape == (0, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_unpacked_as_they_were(dtype):
    first, second = matrices(35, 41, dtype, count=2)
    bias = torch.randn(35)
    assert all(pack_weight(one).unpack()[0].equal(one) for one in (first, first.t()))
    gated = pack_weight(first, up=second, up_bias=bias)
    assert all(got.equal(wanted) for got, wanted in zip(gated.unpack(), (first, second), strict=True))
    assert all(b is not None and b.equal(wanted) for b, wanted in zip(gated.biases(), (0 * bias, bias), strict=True))
    assert gated.nbytes == first.nbytes + second.nbytes


def test_reference_kernels_compute_with_packed_weights():
    (gate, up), x = matrices(20, 30, torch.float32, count=2), torch.randn(4, 30)
    bias, ids = torch.randn(20), torch.tensor([3, 9])
    packed, gated = pack_weight(gate, bias), pack_weight(gate, bias, up=up, up_bias=bias)
    calls: Any = ((linear, x, packed), (gated_linear, x, gated, "gelu_tanh"), (embedding_rows, ids, packed))
    for operator, *given in calls:
        torch.testing.assert_close(operator(*given), in_torch(operator, *given))


def test_what_does_not_fit_is_refused():
    x, weight, quantised = torch.randn(2, 8), torch.randn(5, 8), quantise(torch.randn(5, 8), "int8")
    packed = pack_weight(weight)
    for plain, gated in ((packed, pack_weight(weight, up=weight)), (pack(quantised), pack_gated(quantised, quantised))):
        refused: tuple[tuple[Any, Any, str], ...] = (
            ((torch.randn(2, 7), plain), {}, "does not fit"),
            ((x, plain, torch.randn(2, 4)), {}, "residual"),
            ((x, plain, torch.randn(2, 5).bfloat16()), {}, "residual"),
            ((x, plain), {"out_dtype": torch.bfloat16}, "out_dtype"),
            ((x, gated), {}, "is gated"),
        )
        for arguments, options, words in refused:
            with pytest.raises(ValueError, match=words):
                linear(*arguments, **options)
        with pytest.raises(ValueError, match="not gated"):
            gated_linear(x, plain, "silu")
    for call, words in (
        (lambda: linear(x.bfloat16(), packed), "does not fit"),
        (lambda: pack_weight(weight, torch.randn(4)), "bias"),
        (lambda: pack_weight(weight, up=torch.randn(5, 9)), "alike"),
        (lambda: pack_weight(weight.to(torch.int8)), "packed"),
        (lambda: embedding_rows(torch.zeros(3, dtype=torch.int32), packed), "int64"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def small_case() -> None:
    """Small linear layers with all that belongs to them."""
    torch.manual_seed(0)
    for dtype, (rows, width, outputs) in zip(DTYPES[:2], ((40, 600, 17), (19, 64, 40)), strict=True):
        test_linear(dtype, (rows, width, outputs))
        test_linear(dtype, (1, 33, 20))
    test_gated(torch.bfloat16, "silu")
    test_embedding(torch.bfloat16, 33)
    small_quantised_case()


ARM = CpuTarget(
    triple="aarch64-unknown-linux-gnu", name="neoverse-n1", features="", x86=False, avx512=False, bf16=False, vnni=False,
    amx=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "maker"),
    some_daily(
        [("linear.cpu_kernel", "make_linear"), ("sample.cpu_kernel", "make_sample"), ("logprobs", "make_logprobs")],
        [("linear.cpu_kernel", "make_linear")],
    ),
)
def test_arm_code_can_be_made(module, maker):
    of_linear = {"method": "wide", "dtype": "f32", "out_dtype": "f32", "activation": "silu", "registers": 8}
    code = object_code(cpu_kernel(f"transom_kernels.{module}", maker, **(of_linear if "linear" in maker else {})), ARM)
    assert (code[:4], int.from_bytes(code[18:20], "little")) == (b"\x7fELF", 183)  # EM_AARCH64


def in_torch(operator: Callable[..., torch.Tensor], *arguments: Any, **options: Any) -> torch.Tensor:
    with prefer("reference"):
        return operator(*arguments, **options)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the order of float32 roundings; one step of bfloat16 where that changes its rounding."""
    exact = got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-5 if exact else 2**-7, atol=2e-5)


@pytest.mark.parametrize(("format", "dtype"), [("int8", torch.bfloat16), *((name, torch.float32) for name in FORMATS)])
@pytest.mark.parametrize("shape", QUANTISED_SHAPES, ids=str)
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
        assert_close(gated_linear(x, weight, activation), in_torch(gated_linear, x, weight, activation))


def test_logits():
    x, weight = torch.randn(6, 64).bfloat16(), pack(quantise(torch.randn(50, 64), "int8"))
    for scale, cap in ((1.0, None), (0.3, None), (1.0, 5.0), (0.3, 5.0)):
        how: dict[str, Any] = {"scale": scale, "soft_cap": cap, "out_dtype": torch.float32}
        assert_close(linear(x, weight, **how), in_torch(linear, x, weight, **how))


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


@pytest.mark.parametrize(("format", "limit"), [*zip(FORMATS, (0.006, 0.005, 0.09, 0.08), strict=True)])
def test_rounding_a_weight(format, limit):
    weight = torch.randn(50, 70)
    weight[7] = 0
    rows = quantise(weight, format)
    assert (rows.dequantised() - weight).norm() / weight.norm() < limit
    assert rows.dequantised()[7].equal(weight[7])


@pytest.mark.parametrize("format", FORMATS)
def test_packing_keeps_rows(format):
    first, other = quantise(torch.randn(50, 70), format), quantise(torch.randn(50, 70), format)
    (unpacked,) = pack(concatenated([first, other])).unpacked()
    assert unpacked.dequantised().equal(torch.cat([first.dequantised(), other.dequantised()]))
    for rows, wanted in zip(pack_gated(first, other).unpacked(), (first, other), strict=True):
        assert rows.dequantised().equal(wanted.dequantised())


def test_bytes_in_memory():
    weight = torch.randn(64, 64)
    assert [pack(quantise(weight, format)).nbytes * 8 / weight.numel() for format in FORMATS] == [8.5, 9.0, 4.5, 5.0]


# --- checked, and on other processors


def small_quantised_case() -> None:
    for format in FORMATS[::3]:
        rows = quantise(torch.randn(21, 70), format)
        for x in (torch.randn(3, 70), torch.randn(9, 70)):
            assert_close(linear(x, pack(rows)), in_torch(linear, x, pack(rows)))
        test_integers_are_exact(format)
    assert uses_cpu_kernels(x)
