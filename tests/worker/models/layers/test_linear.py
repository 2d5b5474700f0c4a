"""Every linear layer against a plain product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_core.errors import ConfigError
from transom_kernels.launch import prefer
from transom_kernels.linear import pack_weight
from transom_worker.models.layers.linear import KernelLinear, PlainLinear, make_linear

SHAPES = [(1, 1, 1), (1, 16, 32), (3, 17, 5), (33, 64, 48), (130, 96, 7)]


def operands(shape, dtype):
    m, k, n = shape
    torch.manual_seed(m + k + n)
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_matches_a_plain_product(shape, dtype, biased, kernels):
    x, weight, bias = operands(shape, dtype)
    with prefer(kernels):
        layer = make_linear(weight, bias if biased else None)
    wanted = x.float() @ weight.float().T + (bias.float() if biased else 0)
    limit = 1e-4 if dtype == torch.float32 else 0.02 * shape[1] ** 0.5
    torch.testing.assert_close(layer(x).float(), wanted, atol=limit, rtol=0.01)
    residual = torch.randn(shape[0], shape[2]).to(dtype)
    before = residual.clone()
    torch.testing.assert_close(layer.add_to(residual, x).float(), wanted + residual.float(), atol=limit, rtol=0.01)
    assert residual.equal(before)


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.02), ("int4", 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 48), (4, 576, 96), (33, 70, 17)], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_error_of_quantised_layers_is_that_of_rounding(shape, dtype, quantization, limit, kernels):
    x, weight, bias = operands(shape, dtype)
    x[0] = 0
    residual = torch.randn(shape[0], shape[2]).to(dtype)
    wanted = x.float() @ weight.float().T + bias.float()
    layer = make_linear(weight, bias, quantization=quantization)
    with prefer(kernels):
        for got, target in ((layer(x), wanted), (layer.add_to(residual, x), wanted + residual.float())):
            assert got.dtype == dtype
            assert (got.float() - target).norm() / target.norm() < limit


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.floats(1e-6, 1e6))
def test_int8_scales_with_its_rows(rows, factor):
    torch.manual_seed(rows)
    x, layer = torch.randn(rows, 32), make_linear(torch.randn(16, 32), quantization="int8")
    torch.testing.assert_close(layer(x * factor), layer(x) * factor, rtol=0.02, atol=0.05 * factor)


def test_no_rows_give_no_rows():
    x, weight, _ = operands((1, 16, 8), torch.bfloat16)
    for layer in (
        PlainLinear(weight, None),
        KernelLinear(pack_weight(weight)),
        make_linear(weight, quantization="int8"),
    ):
        assert layer(x[:0]).shape == (0, 8)


def test_quantisation_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError, match="float16"):
        make_linear(torch.zeros(4, 4, dtype=torch.float16), quantization="int8")
    with pytest.raises(ConfigError, match="on meta"):
        make_linear(torch.zeros(4, 4, device="meta"), quantization="int4")


def test_weight_bytes():
    weight = torch.zeros(8, 16)
    assert make_linear(weight).weight_bytes == 8 * 16 * 4
    assert make_linear(weight.bfloat16()).weight_bytes == 8 * 16 * 2
    panels = torch.zeros(16, 32)  # half of a panel's rows, and of a group's columns
    assert make_linear(weight, quantization="int8").weight_bytes == 16 * 32 + 16 * 4
    assert make_linear(panels, quantization="int4").weight_bytes == 16 * 32 // 2 + 16 * 4
