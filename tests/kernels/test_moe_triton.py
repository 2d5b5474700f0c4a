"""The grouped matmuls of MoE layers against the reference, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.kernels.test_moe_cpu import GPT_OSS, PLAIN, Kernel, MoeTests, plain_experts, routes
from tests.matrices import some_daily
from transom_kernels.moe.gpu import moe_triton
from transom_kernels.moe.op import moe
from transom_kernels.moe.row_blocks import block_rows, block_rows_triton
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor


@pytest.fixture
def kernel() -> Kernel:
    return moe_triton


@pytest.mark.parametrize(
    "dtype", some_daily([torch.float32, torch.float16, torch.bfloat16], daily=[torch.float32, torch.bfloat16]), ids=str
)
class TestMoe(MoeTests):
    """All of `MoeTests`."""


@settings(max_examples=num_examples(daily=20, exhaustive=60), deadline=None)
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


def test_mxfp4_values() -> None:
    every = torch.arange(16, dtype=torch.uint8)
    tensor = MxTensor(blocks=every.view(1, 1, 16), scales=torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert tensor.dequantised().flatten()[:16:2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert tensor.dequantised().flatten()[16::2].tolist() == [-0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0]


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
    tokens, (gate_up, x) = 300, (eighths(4, 40, 36), eighths(300, 36))
    down = torch.zeros(4, 36, 20)
    down[:, torch.arange(36), torch.randint(0, 20, (36,))] = torch.randn(4, 36)
    tensors, (which, weights) = ExpertTensors(gate_up=gate_up, down=down), routes(tokens, 2, 4)
    weights = (weights * 8).ceil() / 8
    whole = moe_triton(x, which, weights, tensors, rule, scales_input=scales_input)
    for token in (0, 17, 299):
        at = slice(token, token + 1)
        alone = moe_triton(x[at], which[at], weights[at], tensors, rule, scales_input=scales_input)
        assert torch.equal(alone, whole[at])


def test_what_does_not_fit_is_refused() -> None:
    tensors, (which, weights) = plain_experts(2, 20, 36), routes(3, 1, 2)
    with pytest.raises(ValueError, match=r"give \[E, 2I, N\]"):
        moe(torch.zeros(3, 35), which, weights, tensors, PLAIN)
    with pytest.raises(ValueError, match="4 tokens"):
        moe(torch.zeros(4, 36), which, weights, tensors, PLAIN)
