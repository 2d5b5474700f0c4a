"""rotary, rms_norm, gated_silu and block_copy against their references and small examples."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_kernels.block_copy import block_copy
from transom_kernels.block_copy.reference import block_copy_reference
from transom_kernels.gated_mlp import gated_activation, gated_silu
from transom_kernels.gated_mlp.reference import gated_gelu_tanh_reference, gated_silu_reference
from transom_kernels.launch import prefer
from transom_kernels.rms_norm import head_norm_, rms_norm
from transom_kernels.rms_norm.reference import head_norm_reference, rms_norm_reference
from transom_kernels.rotary import rotary_
from transom_kernels.rotary.reference import rotary_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "table_heads"), [(1, 1, 1), (5, 3, 1), (7, 4, 4)])
def test_rotary(dtype, tokens, heads, table_heads):
    x = torch.randn(tokens, heads, 10).to(dtype)
    cos, sin = (torch.randn(tokens, table_heads, 10).to(dtype) for _ in range(2))
    wanted = rotary_reference(x.float(), cos.float(), sin.float())
    wide = torch.full((tokens, heads + 2, 10), 7.0, dtype=dtype)
    wide[:, :heads] = x
    rotary_(wide[:, :heads], cos, sin)
    torch.testing.assert_close(wide[:, :heads].float(), wanted, atol=LIMIT[dtype], rtol=LIMIT[dtype])
    assert wide[:, heads:].eq(7).all()


@pytest.mark.parametrize("width", [2, 6, 10])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_a_part_and_interleaved(width, interleaved):
    x, cos, sin = torch.randn(5, 3, 10), torch.randn(5, 1, width), torch.randn(5, 1, width)
    wanted = rotary_reference(x, cos, sin, interleaved=interleaved)
    rotary_(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_heads_are_normalised_by_themselves(dtype, weighted, tokens):
    wide = torch.randn(tokens, 7, 10).to(dtype)
    before, weight = wide.clone(), torch.randn(4, 10).to(dtype) if weighted else None
    wanted = head_norm_reference(wide[:, 1:5].float(), None if weight is None else weight.float(), 1e-5)
    head_norm_(wide[:, 1:5], weight, 1e-5)
    torch.testing.assert_close(wide[:, 1:5].float(), wanted, atol=LIMIT[dtype], rtol=LIMIT[dtype])
    assert wide[:, [0, 5, 6]].equal(before[:, [0, 5, 6]])


def test_head_norm_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="give \\[heads, width\\]"):
        head_norm_(torch.zeros(2, 3, 4), torch.zeros(4), 1e-5)


def test_a_wide_weight_is_multiplied_before_rounding():
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(16)
    got = rms_norm(x, weight, 1e-5)[0]
    assert got.equal(rms_norm_reference(x, weight, 1e-5))
    heads = x.view(5, 2, 8).clone()
    head_norm_(heads, weight.view(2, 8), 1e-5)
    assert heads.equal(head_norm_reference(x.view(5, 2, 8), weight.view(2, 8), 1e-5))


def test_gelu_is_the_tanh_approximation():
    x = torch.randn(5, 12)
    torch.testing.assert_close(gated_activation(x, "gelu_tanh"), gated_gelu_tanh_reference(x))


def test_rotary_turns_pairs():
    angle = torch.tensor(0.3)
    x = torch.randn(1, 1, 4)
    turned = torch.view_as_real(torch.complex(x[0, 0, :2], x[0, 0, 2:]) * torch.exp(1j * angle)).T.flatten()
    sin = angle.sin() * torch.tensor([[[-1.0, -1.0, 1.0, 1.0]]])
    rotary_(x, angle.cos().expand(1, 1, 4), sin)
    torch.testing.assert_close(x[0, 0], turned)


def test_rotary_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="odd"):
        rotary_(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match="needs tables"):
        rotary_(torch.zeros(2, 1, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65])
def test_rms_norm(dtype, rows):
    x, weight, residual = (torch.randn(*dims).to(dtype) for dims in ((rows, 33), (33,), (rows, 33)))
    out, same = rms_norm(x, weight, 1e-5)
    assert same is x
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5), atol=LIMIT[dtype], rtol=LIMIT[dtype])
    out, total = rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, rms_norm_reference(total, weight, 1e-5), atol=LIMIT[dtype], rtol=LIMIT[dtype])


def test_rms_norm_of_sums():
    x, residual, inner, weight = (torch.randn(*dims).bfloat16() for dims in ((5, 33), (5, 33), (33,), (33,)))
    normed = rms_norm(x, inner, 1e-5)[0]
    out, total = rms_norm(x, weight, 1e-5, residual, inner=inner)
    assert total.equal(residual + normed)
    assert out.equal(rms_norm(total, weight, 1e-5)[0])
    same, total = rms_norm(x, None, 1e-5, residual, inner=inner, factor=0.3)
    assert same.equal((residual + normed) * 0.3)
    assert total.equal(same)


@pytest.mark.parametrize("parts", [{"weight": None}, {"inner": torch.ones(4)}, {"factor": 2.0}], ids=str)
def test_rms_norm_needs_a_residual_for_parts_of_a_sum(parts):
    with pytest.raises(ValueError, match="give a residual"):
        rms_norm(torch.zeros(2, 4), **({"weight": torch.ones(4), "eps": 1e-5} | parts))


def test_rms_norm_of_zeros_and_wrong_width():
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-5)[0].eq(0).all()
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(torch.zeros(2, 4), torch.ones(3), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gated_silu(dtype, rows):
    x = torch.randn(rows, 14).to(dtype)
    torch.testing.assert_close(gated_silu(x), gated_silu_reference(x), atol=LIMIT[dtype], rtol=LIMIT[dtype])
    with pytest.raises(ValueError, match="width 13"):
        gated_silu(x[:, :13])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    staged_blocks=st.sampled_from([2, 100]),
)
def test_block_copy_is_as_one_after_the_other(kernels, pairs, staged_blocks):
    wanted = torch.randint(0, 255, (6, 40), dtype=torch.uint8)
    got = wanted.clone()
    block_copy_reference(wanted[:, :32], pairs)
    with patch("transom_kernels.block_copy.op.STAGED_BYTES", staged_blocks * 32), prefer(kernels):
        block_copy(got[:, :32], pairs)
    assert got.equal(wanted)


def test_block_copy_refuses_foreign_ids():
    with pytest.raises(ValueError, match="copy 0 -> 6"):
        block_copy(torch.zeros(6, 4), [(0, 6)])
