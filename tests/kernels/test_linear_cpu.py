"""The CPU kernels of linear layers and of the embedding against the reference: odd shapes, strides, threads, processors."""

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
from transom_kernels.quantised_linear import pack, pack_gated, quantise

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# M, K, N: one row, odd widths, tiles that are full, one more and one less, several chunks of K and several blocks of rows
SHAPES = [(1, 1, 1), (3, 17, 5), (15, 32, 16), (16, 64, 31), (17, 66, 33), (33, 1100, 48), (70, 96, 7), (300, 600, 40)]


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
    got = linear(x, biased, residual)
    torch.testing.assert_close(got, wanted, **limit(dtype))


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
        wide = biases[0].float(), biases[1].float()
        wanted = gated_linear_reference(x, gate, up, wide, activation=activation)
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
    packed = pack_weight(weight)
    got = linear(x, packed, scale=3.0, soft_cap=2.0, out_dtype=torch.float32)
    wanted = linear_reference(x, weight, scale=3.0, soft_cap=2.0, out_dtype=torch.float32)
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
    assert pack_weight(first).unpack()[0].equal(first)
    assert pack_weight(first.t()).unpack()[0].equal(first.t())
    gated = pack_weight(first, up=second, up_bias=bias)
    assert all(got.equal(wanted) for got, wanted in zip(gated.unpack(), (first, second), strict=True))
    assert all(b is not None and b.equal(wanted) for b, wanted in zip(gated.biases(), (0 * bias, bias), strict=True))
    assert gated.nbytes == first.nbytes + second.nbytes


def test_reference_kernels_compute_with_packed_weights():
    (gate, up), x = matrices(20, 30, torch.float32, count=2), torch.randn(4, 30)
    bias, ids = torch.randn(20), torch.tensor([3, 9])
    packed, gated = pack_weight(gate, bias), pack_weight(gate, bias, up=up, up_bias=bias)
    by_kernel = linear(x, packed), gated_linear(x, gated, "gelu_tanh"), embedding_rows(ids, packed)
    with prefer("reference"):
        by_torch = linear(x, packed), gated_linear(x, gated, "gelu_tanh"), embedding_rows(ids, packed)
    torch.testing.assert_close(by_kernel, by_torch)


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
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == 183  # EM_AARCH64
