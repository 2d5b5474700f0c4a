"""The CPU kernel of gated activations against the reference: widths at the edges of an item, limits, strides, extremes."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.checked import run_checked, run_in_child
from transom_kernels.gated_mlp import Activation, activated_product, gated_activation
from transom_kernels.gated_mlp.cpu import ITEM_ELEMENTS, activated_product_fits
from transom_kernels.gated_mlp.reference import gated_gelu_tanh_reference, gated_silu_reference
from transom_kernels.launch import uses_cpu_kernels

REFERENCES = {"silu": gated_silu_reference, "gelu_tanh": gated_gelu_tanh_reference}
DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    relative = 2e-6 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(
        got, wanted, rtol=relative, atol=5e-6, equal_nan=True
    )  # the reference cancels in 1 + tanh


def compare(dtype: torch.dtype, activation: Activation, width: int, rows: int = 3) -> None:
    wide = torch.full((rows, 2 * width + 3), float("nan")).to(dtype)
    gate_up = wide[:, 1 : 2 * width + 1]
    gate_up.copy_(torch.randn(rows, 2 * width) * 3)
    gate, up = gate_up.chunk(2, dim=1)
    assert uses_cpu_kernels(gate_up)
    assert activated_product_fits(gate, up)
    close(gated_activation(gate_up, activation), REFERENCES[activation](gate_up))
    other = torch.randn(rows, width + 1).to(dtype)[:, 1:]
    close(activated_product(gate, other, activation), REFERENCES[activation](torch.cat([gate, other], dim=1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 15, 16, 17, ITEM_ELEMENTS, ITEM_ELEMENTS + 1, 2 * ITEM_ELEMENTS + 33])
def test_widths(dtype, activation, width):
    compare(dtype, activation, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_limit(dtype):
    gate_up = (torch.randn(3, 70) * 5).to(dtype)
    gate_up[1, 3] = gate_up[2, 60] = float("nan")
    gate, up = gate_up.chunk(2, dim=1)
    clamped = torch.cat([gate.clamp(max=2.0), up.clamp(-2.0, 2.0)], dim=1)
    close(gated_activation(gate_up, "silu", 2.0), gated_silu_reference(clamped))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extremes(activation):
    gate = torch.tensor([[-1e30, -200.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 200.0, 1e30, float("nan"), 1.0]])
    close(gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)[:, 1:9],
          REFERENCES[activation](torch.cat([gate, torch.ones_like(gate)], dim=1))[:, 1:9])  # fmt: skip
    out = gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)
    assert out.isnan().tolist() == gate.isnan().tolist()


def test_a_row_does_not_depend_on_its_batch_or_on_threads():
    x = torch.randn(7, 2 * ITEM_ELEMENTS + 34)
    whole = gated_activation(x, "silu")
    assert all(gated_activation(x[row : row + 1], "silu").equal(whole[row : row + 1]) for row in range(7))
    for threads in (1, 3):
        with kernel_threads(threads):
            assert gated_activation(x, "silu").equal(whole)


def test_more_dimensions_go_on_with_torch():
    x = torch.randn(2, 3, 12)
    close(gated_activation(x, "silu"), gated_silu_reference(x))
    with pytest.raises(ValueError, match="equally large"):
        activated_product(x, x[:1], "silu")


def small_case() -> None:
    for dtype in DTYPES:
        compare(dtype, "silu", 37)
        compare(dtype, "gelu_tanh", 37)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)


@pytest.mark.exhaustive
def test_another_processor():
    run_in_child(small_case, TRANSOM_CPU="haswell")
