"""The CPU kernel of gated activations against the reference: widths at the edges of an item, limits, strides, extremes."""

from __future__ import annotations

import pytest
import torch

from tests.matrices import some_daily
from transom_kernels.gated_mlp import Activation, activated_product, gated_activation
from transom_kernels.gated_mlp.cpu import ITEM_ELEMENTS, fits_cpu
from transom_kernels.gated_mlp.op import activated_product_reference
from transom_kernels.launch import uses_cpu_kernels

VARIANTS = [
    (dtype, activation)
    for activation in ("silu", "gelu_tanh")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
DAILY = [(torch.float32, "silu"), (torch.bfloat16, "silu"), (torch.float32, "gelu_tanh")]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    relative = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[got.dtype]
    # the reference cancels in 1 + tanh
    torch.testing.assert_close(got, wanted, rtol=relative, atol=5e-6, equal_nan=True)


def compare(dtype: torch.dtype, activation: Activation, width: int, rows: int = 3) -> None:
    wide = torch.full((rows, 2 * width + 3), float("nan")).to(dtype)
    gate_up = wide[:, 1 : 2 * width + 1]
    gate_up.copy_(torch.randn(rows, 2 * width) * 3)
    gate, up = gate_up.chunk(2, dim=1)
    assert uses_cpu_kernels(gate_up)
    assert fits_cpu(gate, up)
    close(gated_activation(gate_up, activation), activated_product_reference(gate, up, activation))
    other = torch.randn(rows, width + 1).to(dtype)[:, 1:]
    close(activated_product(gate, other, activation), activated_product_reference(gate, other, activation))


@pytest.mark.parametrize(("dtype", "activation"), some_daily(VARIANTS, DAILY))
@pytest.mark.parametrize("width", [1, 15, 16, 17, ITEM_ELEMENTS, ITEM_ELEMENTS + 1, 2 * ITEM_ELEMENTS + 33])
def test_widths(dtype, activation, width):
    compare(dtype, activation, width)


def test_limit():
    gate_up = (torch.randn(3, 70) * 5).bfloat16()
    gate_up[1, 3] = gate_up[2, 60] = float("nan")
    gate, up = gate_up.chunk(2, dim=1)
    clamped = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    close(gated_activation(gate_up, "silu", 2.0), activated_product_reference(*clamped, "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extremes(activation):
    gate = torch.tensor([[-1e30, -200.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 200.0, 1e30, float("nan"), 1.0]])
    out = activated_product(gate, torch.ones_like(gate), activation)
    close(out[:, 1:9], activated_product_reference(gate, torch.ones_like(gate), activation)[:, 1:9])
    assert out.isnan().tolist() == gate.isnan().tolist()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="equally large"):
        activated_product(torch.zeros(2, 6), torch.zeros(1, 6), "silu")
    with pytest.raises(ValueError, match="width 13"):
        gated_activation(torch.zeros(2, 13), "silu")


def small_case() -> None:
    for dtype, activation in DAILY:
        compare(dtype, activation, 37)  # type: ignore[arg-type]
