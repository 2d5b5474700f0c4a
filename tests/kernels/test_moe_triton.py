"""The grouped matmuls of MoE layers against the reference, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_kernels.moe.gpu import moe_triton
from transom_kernels.moe.op import moe, moe_reference
from transom_kernels.moe.row_blocks import block_rows, block_rows_triton
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor

PLAIN, GPT_OSS = GateRule(), GateRule(gain=1.702, limit=1.5, up_offset=1.0)


def plain_experts(experts: int, inner: int, width: int, dtype: torch.dtype = torch.float32) -> ExpertTensors:
    return ExpertTensors(
        gate_up=(torch.randn(experts, 2 * inner, width) / 4).to(dtype),
        down=(torch.randn(experts, width, inner) / 4).to(dtype),
    )


def mx_tensor(*shape: int) -> MxTensor:
    experts, rows, columns = shape
    return MxTensor(
        blocks=torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8),
        scales=torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8),
    )


def routes(tokens: int, chosen: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, experts).topk(chosen).indices, torch.rand(tokens, chosen)


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("rule", [PLAIN, GPT_OSS, GateRule(activation="gelu_tanh")], ids=["silu", "gpt-oss", "gelu"])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(0, 2, 1), (1, 4, 2), (9, 3, 1), (20, 2, 2)])
def test_plain_experts(rule: GateRule, tokens: int, experts: int, chosen: int) -> None:
    tensors = plain_experts(experts, 20, 36)
    x, (which, weights) = torch.randn(tokens, 36), routes(tokens, chosen, experts)
    for scales_input in (False, True):
        wanted = moe_reference(x, which, weights, tensors, rule, scales_input=scales_input)
        got = moe_triton(x, which, weights, tensors, rule, scales_input=scales_input)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_biases_and_formats(interleaved: bool, dtype: torch.dtype) -> None:
    tensors = replace(
        plain_experts(3, 20, 36, dtype),
        gate_up_bias=torch.randn(3, 40).to(dtype), down_bias=torch.randn(3, 36).to(dtype), interleaved=interleaved,
    )  # fmt: skip
    x, (which, weights) = torch.randn(7, 36).to(dtype), routes(7, 2, 3)
    wanted = moe_reference(x, which, weights, tensors, GPT_OSS)
    got = moe_triton(x, which, weights, tensors, GPT_OSS)
    limit = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("interleaved", [False, True])
def test_mxfp4_as_stored(interleaved: bool) -> None:
    tensors = ExpertTensors(
        gate_up=mx_tensor(3, 64, 96), down=mx_tensor(3, 96, 32), interleaved=interleaved,
        gate_up_bias=torch.randn(3, 64), down_bias=torch.randn(3, 96),
    )  # fmt: skip
    x, (which, weights) = torch.randn(6, 96), routes(6, 2, 3)
    wanted = moe_reference(x, which, weights, tensors, GPT_OSS)
    torch.testing.assert_close(moe_triton(x, which, weights, tensors, GPT_OSS), wanted, atol=1e-4, rtol=1e-4)


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
    tokens, (gate_up, x) = 40, (eighths(4, 40, 36), eighths(40, 36))
    down = torch.zeros(4, 36, 20)
    down[:, torch.arange(36), torch.randint(0, 20, (36,))] = torch.randn(4, 36)
    tensors, (which, weights) = ExpertTensors(gate_up=gate_up, down=down), routes(tokens, 2, 4)
    weights = (weights * 8).ceil() / 8
    whole = moe_triton(x, which, weights, tensors, rule, scales_input=scales_input)
    for token in (0, 17, 39):
        at = slice(token, token + 1)
        alone = moe_triton(x[at], which[at], weights[at], tensors, rule, scales_input=scales_input)
        assert torch.equal(alone, whole[at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_alone_is_close_to_the_same_among_others(dtype: torch.dtype) -> None:
    tensors, (which, weights) = plain_experts(4, 20, 36, dtype), routes(300, 2, 4)
    x = torch.randn(300, 36).to(dtype)
    whole = moe_triton(x, which, weights, tensors, PLAIN)
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for token in (0, 17, 299):
        at = slice(token, token + 1)
        alone = moe_triton(x[at], which[at], weights[at], tensors, PLAIN)
        torch.testing.assert_close(alone, whole[at], atol=limit, rtol=limit)


def test_what_does_not_fit_is_refused() -> None:
    tensors, (which, weights) = plain_experts(2, 20, 36), routes(3, 1, 2)
    with pytest.raises(ValueError, match=r"give \[E, 2I, N\]"):
        moe(torch.zeros(3, 35), which, weights, tensors, PLAIN)
    with pytest.raises(ValueError, match="4 tokens"):
        moe(torch.zeros(4, 36), which, weights, tensors, PLAIN)
