"""The grouped matmuls of MoE layers against the reference, in the interpreter (or on a GPU where there is one)."""

import re
from collections.abc import Callable
from operator import add, and_, lshift, or_, rshift, sub, xor
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.kernels.test_moe_cpu import GPT_OSS, PLAIN, MoeTests, check_moe, check_mx, mx_experts, routes
from tests.matrices import some_daily
from transom_kernels.moe import gpu, gpu_weights, widening
from transom_kernels.moe.gpu import moe_triton
from transom_kernels.moe.gpu_weights import for_gpu, widened_words
from transom_kernels.moe.row_blocks import block_rows, block_rows_triton
from transom_kernels.moe.weights import ExpertTensors, GateRule
from transom_kernels.moe.widening import POWER_FACTORS, SMALL_FACTORS, WIDEN_FP4


def moe_arranged(x: Any, which: Any, weights: Any, tensors: ExpertTensors, *rule: Any, **how: Any) -> torch.Tensor:
    return moe_triton(x, which, weights, for_gpu(tensors), *rule, **how)


@pytest.fixture
def kernel() -> Callable[..., torch.Tensor]:
    return moe_arranged


@pytest.mark.parametrize(
    "dtype", some_daily([torch.float32, torch.float16, torch.bfloat16], daily=[torch.float32, torch.bfloat16]), ids=str
)
class TestMoe(MoeTests):
    """All of `MoeTests`."""


@settings(max_examples=num_examples(daily=20, exhaustive=60))
@given(st.lists(st.integers(0, 6), max_size=70), st.sampled_from([1, 4, 16]))
def test_every_pair_is_in_one_block_of_its_expert(experts: list[int], block_m: int) -> None:
    pairs, block_expert = block_rows(torch.tensor(experts, dtype=torch.int64), 7, block_m)
    found = [(int(p), int(e)) for row, e in zip(pairs, block_expert, strict=True) for p in row if p < len(experts)]
    assert sorted(found) == list(enumerate(experts))
    assert all(e >= 0 or bool((row == len(experts)).all()) for row, e in zip(pairs, block_expert, strict=True))


@pytest.mark.parametrize(("pairs", "experts"), [(0, 4), (1, 1), (5, 3), (128, 7), (300, 40)])
def test_few_pairs_are_sorted_by_one_program(pairs: int, experts: int) -> None:
    chosen = torch.randint(0, experts, (pairs,)) // 2
    for block_m in (16, 64):
        found, wanted = block_rows_triton(chosen, experts, block_m), block_rows(chosen, experts, block_m)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2, 32, 160), (70, 2, 96, 32), (110, 1, 160, 96)])
def test_mxfp4_in_both_arrangements(monkeypatch: pytest.MonkeyPatch, is_hopper: bool, sizes: tuple[int, ...]) -> None:
    """Of few and many rows of an expert; rows, groups and tiles do not fit each other."""
    for module in (gpu, gpu_weights):
        monkeypatch.setattr(module, "spreads_elements", lambda _: is_hopper)
    tokens, experts, inner, width = sizes
    x, chosen = torch.randn(tokens, width).bfloat16(), routes(tokens, 1, experts)
    check_moe(moe_arranged, x, chosen, mx_experts(experts, inner, width), GPT_OSS)


def test_mxfp4_values_and_scales() -> None:
    """Every value, and scales from the smallest exact one to the largest one; what is larger is refused."""
    check_mx(moe_arranged, [27, 60, 126, 127, 128, 160])
    with pytest.raises(ValueError, match=r"above 2 \*\* 33"):
        check_mx(moe_arranged, [27, 60, 126, 127, 128, 161])


def test_instructions_that_widen_mxfp4_do_what_the_interpreter_does() -> None:
    """Of all words, two at a time, as if their scale's factor were 1; of scales, four at a time."""
    words, scales = torch.arange(1 << 16).view(-1, 2), torch.arange(160).view(-1, 4)
    for got, wanted in zip(run(WIDEN_FP4, words @ HALVES, 4), widened_words(words), strict=True):
        assert torch.equal(got, wanted.masked_fill(wanted == 0x8000, 0) @ HALVES)  # -0 + 0 is 0
    # every e4m3 number above zero, in five bits of exponent
    small = torch.arange(1, 121, dtype=torch.uint8).view(torch.float8_e4m3fn)
    stored = gpu_weights._bits(small, "fp4").long().view(-1, 4)
    wide = (small.double() * 2.0**94).bfloat16().view(torch.int16).long().view(-1, 2, 2)
    for got, wanted in zip(run(SMALL_FACTORS, stored @ 256 ** torch.arange(4), 2), wide.unbind(1), strict=True):
        assert torch.equal(got, wanted @ HALVES)
    factors = (scales - 33.0).exp2().bfloat16().view(torch.int16).long().view(-1, 2, 2)
    for got, wanted in zip(run(POWER_FACTORS, scales @ 256 ** torch.arange(4), 2), factors.unbind(1), strict=True):
        assert torch.equal(got, wanted @ HALVES)


@pytest.mark.parametrize("numbers", ["int4", "int4 zeros", "int8", "int8 zeros", "fp8"])
def test_instructions_that_widen_numbers_round_once(numbers: str) -> None:
    """All words, two at a time, with random factors and zero points."""
    code, bits = getattr(widening, f"WIDEN_{numbers.upper().replace(' ', '_')}"), 4 if "4" in numbers else 8
    words = torch.arange(1 << 16).view(-1, 2)
    scales, zeros = torch.rand(len(words), 1).bfloat16().double(), torch.randint(0, 1 << bits, (len(words), 1))
    power = 88 if numbers == "fp8" else 101
    factors = (scales * 2.0**power).bfloat16().view(torch.int16).long().expand(-1, 2)
    others = factors @ HALVES, zeros.expand(-1, 2) @ HALVES
    for at, got in enumerate(run(code, words @ HALVES, 16 // bits, *others)):
        levels = words >> bits * at & (1 << bits) - 1
        if numbers == "fp8":
            wanted = (levels.to(torch.uint8).view(torch.float8_e4m3fn).double() * scales).nan_to_num(nan=0.0)
            got = torch.where(levels & 127 == 127, 0, torch.stack((got & 0xFFFF, got >> 16), -1))
        else:
            middle = zeros if "zeros" in numbers else 1 << bits - 1
            wanted, got = (levels - middle) * scales, torch.stack((got & 0xFFFF, got >> 16), -1)
        assert torch.equal(got.to(torch.int16).view(torch.bfloat16).double() * 2.0**32, wanted.bfloat16().double())


HALVES = torch.tensor([1, 1 << 16])  # of a register
PTX: dict[str, Callable[..., Any]] = {
    "and.b32": and_, "or.b32": or_, "xor.b32": xor, "shl.b32": lshift, "shr.u32": rshift, "mov.b32": int, "add.u32": add,
    "sub.u32": sub, "fma.rn.bf16x2": lambda a, b, c: fused(a, b, c), "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": lambda a, b, at: sum((a >> 8 * (at >> 4 * n & 15) & 0xFF) << 8 * n for n in range(4)),
}  # fmt: skip


def fused(*numbers: Any) -> torch.Tensor:
    """a * b + c of two bfloat16 numbers in each register, rounded once."""
    registers = torch.broadcast_tensors(*(torch.as_tensor(number) for number in numbers))
    halves = (torch.stack((bits & 0xFFFF, bits >> 16), -1).to(torch.int16) for bits in registers)
    a, b, c = (numbers.view(torch.bfloat16).double() for numbers in halves)
    return ((a * b + c).bfloat16().view(torch.int16).long() & 0xFFFF) @ HALVES


def run(instructions: tl.constexpr, argument: Any, results: int, *others: Any) -> list[torch.Tensor]:
    """Run instructions of PTX on numbers of 32 bits in int64; return the registers `$0`, `$1` and so on."""
    given = (argument, *(others or (0x3F803F80,) * 2))
    values: dict[str, Any] = {f"${results + at}": value for at, value in enumerate(given)}
    for name, target, operands in re.findall(rf"({'|'.join(PTX)}) (\S+), ([^;]+);", instructions.value):
        read = [values[source] if source in values else int(source, 0) for source in operands.split(", ")]
        values[target] = PTX[name](*read) & 0xFFFFFFFF
    return [values[f"${at}"] for at in range(results)]


def eighths(*shape: int) -> torch.Tensor:
    """Random multiples of 1/8 from -1 to 1."""
    return torch.randint(-8, 9, shape) / 8


@pytest.mark.parametrize(("rule", "scales_input"), [(PLAIN, False), (GPT_OSS, True)], ids=["plain", "gpt-oss"])
def test_a_token_does_not_depend_on_the_others(rule: GateRule, scales_input: bool) -> None:
    """Bit for bit: the batch decides which rows of which blocks a token has, and has no part in its arithmetic.

    The order in which the interpreter's products, which are numpy's, add up depends on the processor and on the rest of the block.
    Here no order makes a difference: float32 holds all inputs, products and sums of the first product exactly, and each sum of the
    second has one term that is not zero.
    """
    tokens, (gate_up, x) = 70, (eighths(4, 40, 36), eighths(70, 36))
    down = torch.zeros(4, 36, 20)
    down[:, torch.arange(36), torch.randint(0, 20, (36,))] = torch.randn(4, 36)
    tensors, (which, weights) = ExpertTensors(gate_up=gate_up, down=down), routes(tokens, 2, 4)
    weights = (weights * 8).ceil() / 8
    whole = moe_triton(x, which, weights, tensors, rule, scales_input=scales_input)
    for token in (0, 17, 69):
        at = slice(token, token + 1)
        alone = moe_triton(x[at], which[at], weights[at], tensors, rule, scales_input=scales_input)
        assert torch.equal(alone, whole[at])
