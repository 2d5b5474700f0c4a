"""The CPU kernels of small operators against their references: odd widths, strides, extremes, and what is refused."""

import math
from typing import Any

import pytest
import torch

from tests.matrices import matrix, some_daily
from transom_kernels import layer_norm as layer_norms, position_scale as position_scales
from transom_kernels.gated_mlp import Activation, activated_product, gated_activation, op as gated_mlp
from transom_kernels.launch import prefer, uses_cpu_kernels
from transom_kernels.layer_norm import layer_norm, layer_norm_reference
from transom_kernels.logprobs import RowLogprobs, logprobs, logprobs_reference
from transom_kernels.position_scale import position_scale, position_scale_reference
from transom_kernels.rms_norm import op as rms_norms, rms_norm
from transom_kernels.rms_norm.op import rms_norm_reference
from transom_kernels.rotary import op as rotary, rotary_, rotary_tables
from transom_kernels.rotary.op import rotary_reference


def strided(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows in the middle of wider rows of NaN."""
    wide = torch.full((rows, width + 5), float("nan"))
    wide[:, 2 : width + 2] = torch.randn(rows, width)
    return wide.to(dtype)[:, 2 : width + 2]


def limit(dtype: torch.dtype, *, exact: float = 1e-5, atol: float = 1e-3) -> dict[str, Any]:
    """A rounding of the dtype; in float32, where sums have another order, `exact`."""
    if dtype == torch.float32:
        return {"rtol": exact, "atol": exact}
    return {"rtol": 2**-10 if dtype == torch.float16 else 2**-7, "atol": atol}


EPS = 1e-5
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]


# --- norms

PAIRS = some_daily([(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)], [(F32, F32), (BF16, BF16)])


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 32, 33, 576])
def test_rms_norm(dtype, weight_dtype, width):
    """Alone, of sums with the residual, and of sums of normalised rows."""
    x, residual = strided(5, width, dtype), strided(5, width, dtype)
    inner, weight = torch.randn(width).to(weight_dtype), torch.randn(width).to(weight_dtype)
    assert uses_cpu_kernels(x)
    assert rms_norms.rows_fit(x, weight, residual, inner)
    out, same = rms_norm(x, weight, EPS)
    assert same is x
    torch.testing.assert_close(out, rms_norm_reference(x, weight, EPS), **limit(dtype, exact=2e-6, atol=1e-6))
    out, total = rms_norm(x, weight, EPS, residual)
    assert total.equal(residual + x)
    assert out.equal(rms_norm(total, weight, EPS)[0])
    out, total = rms_norm(x, weight, EPS, residual, inner=inner, factor=0.3)
    assert total.equal((residual + rms_norm(x, inner, EPS)[0]) * 0.3)
    assert out.equal(rms_norm(total, weight, EPS)[0])
    same, total = rms_norm(x, None, EPS, residual)
    assert same is total
    assert total.equal(residual + x)


def test_rms_norm_of_more_dimensions():
    x, weight = torch.randn(3, 4, 20), torch.randn(20)
    assert not rms_norms.rows_fit(x.transpose(0, 1), weight, None, None)
    for rows in (x, x.transpose(0, 1)):
        torch.testing.assert_close(rms_norm(rows, weight, EPS)[0], rms_norm_reference(rows, weight, EPS))


def test_a_wide_weight_is_multiplied_before_rounding():
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(16)
    assert rms_norm(x, weight, EPS)[0].equal(rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("parts", [{"weight": None}, {"inner": torch.ones(4)}, {"factor": 2.0}], ids=str)
def test_parts_of_a_sum_need_a_residual(parts):
    with pytest.raises(ValueError, match="give a residual"):
        rms_norm(torch.zeros(2, 4), **({"weight": torch.ones(4), "eps": EPS} | parts))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("width", [2, 15, 16, 17, 33, 576])
def test_layer_norm(dtype, width):
    x, weight = strided(5, width, dtype), torch.randn(width).to(dtype)
    x += 3
    assert layer_norms.fits_cpu(x, weight)
    for bias in (None, torch.randn(width).to(dtype)):
        wanted = layer_norm_reference(x, weight, EPS, bias)
        torch.testing.assert_close(layer_norm(x, weight, EPS, bias), wanted, **limit(dtype, exact=3e-6, atol=1e-5))


# --- gated activations

GATED = [(dtype, activation) for activation in ("silu", "gelu_tanh", "relu2") for dtype in DTYPES]


def assert_activated(got: torch.Tensor, wanted: torch.Tensor) -> None:
    relative = {F32: 2e-6, BF16: 2**-7, F16: 2**-10}[got.dtype]
    # the reference cancels in 1 + tanh
    torch.testing.assert_close(got, wanted, rtol=relative, atol=5e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "activation"), some_daily(GATED, [(F32, "silu"), (BF16, "silu"), (F32, "gelu_tanh"), (BF16, "relu2")])
)
@pytest.mark.parametrize("width", [1, 15, 16, 17, *(gated_mlp.ITEM_ELEMENTS + more for more in (0, 1, 1057))])
def test_gated_activations(dtype: torch.dtype, activation: Activation, width: int) -> None:
    gate_up = strided(3, 2 * width, dtype) * 3
    gate, up = gate_up.chunk(2, dim=1)
    assert gated_mlp.fits_cpu(gate, up)
    if activation == "relu2":  # of ups alone
        gate_up[0, 0] = math.nan
        gate = up = gate_up
    wanted = gated_mlp.activated_product_reference(gate, up, activation)
    assert_activated(gated_activation(gate_up, activation), wanted)
    if activation == "relu2":
        return
    other = torch.randn(3, width + 1).to(dtype)[:, 1:]
    wanted = gated_mlp.activated_product_reference(gate, other, activation)
    assert_activated(activated_product(gate, other, activation), wanted)


def test_limits_of_gates_and_ups():
    gate_up = (torch.randn(3, 70) * 5).bfloat16()
    gate_up[1, 3] = gate_up[2, 60] = math.nan
    gate, up = gate_up.chunk(2, dim=1)
    clamped = gate.clamp(max=2.0), up.clamp(-1.5, 1.5)
    assert_activated(
        gated_activation(gate_up, "silu", (2.0, 1.5)), gated_mlp.activated_product_reference(*clamped, "silu")
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extreme_gates(activation):
    gate = torch.tensor([[-1e30, -200.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 200.0, 1e30, math.nan, 1.0]])
    out = activated_product(gate, torch.ones_like(gate), activation)
    wanted = gated_mlp.activated_product_reference(gate, torch.ones_like(gate), activation)
    assert_activated(out[:, 1:9], wanted[:, 1:9])
    assert out.isnan().tolist() == gate.isnan().tolist()


# --- positions

ROTATIONS = [(dtype, interleaved) for dtype in DTYPES for interleaved in (False, True)]


def check_rotation(dtype: torch.dtype, interleaved: bool, width: int, *, table_heads: int = 1) -> None:
    wide = torch.randn(5, 6, width + 7).to(dtype)
    x, before = wide[:, 1:5, 3:], wide.clone()
    cos, sin = (torch.randn(5, table_heads, width).to(dtype) for _ in range(2))
    assert rotary.heads_fit(x, cos, sin)
    wanted = rotary_reference(x.float(), cos.float(), sin.float(), interleaved=interleaved).to(dtype)
    rotary_(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(x, wanted, rtol={F32: 1e-6, BF16: 2**-8, F16: 2**-10}[dtype], atol=1e-6)
    before[:, 1:5, 3 : width + 3] = x[..., :width]
    assert wide.equal(before)


@pytest.mark.parametrize(("dtype", "interleaved"), some_daily(ROTATIONS, [(F32, True), (BF16, False), (F32, False)]))
@pytest.mark.parametrize("width", [2, 14, 16, 18, 32, 34, 64])
def test_rotation(dtype, interleaved, width):
    check_rotation(dtype, interleaved, width)


def test_rotation_by_tables_of_each_head():
    check_rotation(F32, False, 20, table_heads=4)


def test_pairs_are_turned():
    angle = torch.tensor(0.3)
    x = torch.randn(1, 1, 4)
    turned = torch.view_as_real(torch.complex(x[0, 0, :2], x[0, 0, 2:]) * torch.exp(1j * angle)).T.flatten()
    sin = angle.sin() * torch.tensor([[[-1.0, -1.0, 1.0, 1.0]]])
    rotary_(x, angle.cos().expand(1, 1, 4), sin)
    torch.testing.assert_close(x[0, 0], turned)


@pytest.mark.parametrize(("dtype", "width", "scale"), matrix(DTYPES[:2], [2, 16, 34, 128], [1.0, 1.3]))
def test_rotary_tables(dtype, width, scale):
    positions = torch.tensor([0, 1, 2, 77, 4095, 8191, 131_071, 1_048_575, 10_000_000])
    frequency = 10_000.0 ** -torch.linspace(0, 1, width)
    sign = torch.randn(width).sign()
    assert rotary.tables_fit(positions, frequency, sign, dtype)
    got = rotary_tables(positions, frequency, sign, dtype, scale)
    with prefer("reference"):
        wanted = rotary_tables(positions, frequency, sign, F32, scale)
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape) == (dtype, (9, 1, width))
        rtol, atol = (0.0, 2e-7) if dtype == F32 else (2**-8, 1e-6)
        torch.testing.assert_close(one.float(), other, rtol=rtol, atol=atol)


def test_cosine_and_sine_are_exact_to_the_last_bit_but_one():
    positions, ones = torch.arange(1 << 16), torch.ones(1)
    cos, sin = rotary_tables(positions, ones, ones, F32)
    for got, wanted in ((cos, positions.double().cos()), (sin, positions.double().sin())):
        assert float((got.flatten().double() - wanted).abs().max()) < 1.2e-7


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("interval", "first"), [(1, 1), (7, 0), (8192, 1)])
def test_position_scale(dtype, interval, first):
    near, far = torch.arange(3 * position_scales.ITEM_TOKENS + 1), [8190, 8191, 8192, 131_071, 9_999_999]
    positions = torch.cat([near, torch.tensor(far)])
    assert position_scales.fits_cpu(positions, dtype)
    got = position_scale(positions, factor=0.1, interval=interval, first=first, dtype=dtype)
    wanted = position_scale_reference(positions, factor=0.1, interval=interval, first=first, dtype=dtype)
    torch.testing.assert_close(got, wanted, rtol=2e-7 if dtype == F32 else 2**-7, atol=0)


# --- log-probabilities


def check_logprobs(logits: torch.Tensor, num_top: int) -> RowLogprobs:
    chosen = torch.randint(0, logits.shape[1], (len(logits),))
    got = logprobs(logits, chosen, num_top)
    _, values, ranks = logprobs_reference(logits, chosen, min(num_top, logits.shape[1]))
    assert torch.equal(got.ranks, ranks)
    torch.testing.assert_close(got.logprobs, values, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.logprobs, logits.log_softmax(-1).gather(1, got.ids), rtol=1e-5, atol=2e-6)
    assert all(len(set(row[1:])) == len(row) - 1 for row in got.ids.tolist())
    return got


@pytest.mark.parametrize(
    ("vocabulary", "num_top"),
    matrix([1, 15, 16, 17, 64, 65, 1000, 8191, 8192, 8193, 16_500], [0, 1, 5, 20], strength=1),
)
def test_logprobs(vocabulary: int, num_top: int) -> None:
    logits = strided(6, vocabulary, F32) * 4
    assert torch.equal(check_logprobs(logits, num_top).ids[:, 1:], logits.topk(min(num_top, vocabulary)).indices)
    logits[torch.rand(logits.shape) < 0.7] = -math.inf
    logits[:, 0] = 1.0
    check_logprobs(logits, num_top)


def test_equal_logits_are_listed_by_id_and_share_a_rank() -> None:
    logits = torch.randn(6, 3000).round()
    for row, values in zip(check_logprobs(logits, 20).ids.tolist(), logits, strict=True):
        assert row[1:] == sorted(range(3000), key=lambda token: (-float(values[token]), token))[:20]


# --- all of them


def test_what_does_not_fit_is_refused():
    zeros: Any = torch.zeros
    for call, words in (
        (lambda: rms_norm(zeros(2, 4), torch.ones(3), EPS), "does not fit"),
        (lambda: layer_norm(zeros(2, 5), zeros(4), EPS), "does not fit"),
        (lambda: activated_product(zeros(2, 6), zeros(1, 6), "silu"), "equally large"),
        (lambda: gated_activation(zeros(2, 13), "silu"), "width 13"),
        (lambda: rotary_(zeros(1, 1, 3), zeros(1, 1, 3), zeros(1, 1, 3)), "odd"),
        (lambda: rotary_(zeros(2, 1, 4), zeros(1, 1, 4), zeros(1, 1, 4)), "needs tables"),
        (lambda: position_scale(zeros(1).long(), factor=0.1, interval=0, first=1, dtype=F32), "at least 1"),
        (lambda: logprobs(zeros(2, 5), zeros(3).long(), 1), "chosen"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def small_case() -> None:
    for dtype in DTYPES[:2]:
        test_rms_norm(dtype, dtype, 37)
        test_layer_norm(dtype, 37)
        test_gated_activations(dtype, "silu", 37)
        check_rotation(dtype, dtype == F32, 22)
        test_rotary_tables(dtype, 22, 1.3)
        test_position_scale(dtype, 2, 1)
    test_gated_activations(F32, "gelu_tanh", 37)
    check_logprobs(torch.randn(6, 8200), 5)
