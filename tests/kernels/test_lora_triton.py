"""The Triton kernels of `add_lora_`, in the interpreter (or on a GPU where there is one)."""

import pytest
import torch

from tests.kernels.test_lora import STARTS, check, lora_weights, slots_of
from tests.matrices import matrix
from transom_kernels.launch import INTERPRETED
from transom_kernels.lora import gpu
from transom_kernels.lora.gpu import add_lora_triton_

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is cut into several pieces even where it is short."""
    monkeypatch.setattr(gpu, "MIN_PIECE", 32)


@pytest.mark.parametrize(
    ("num_rows", "width", "parts", "rank", "dtype"),
    matrix([1, 3, 17, 70], [50, 300], list(STARTS), [8, 16, 64, 256], [F32, BF16, F16]),
)
def test_against_the_formula(num_rows: int, width: int, parts: int, rank: int, dtype: torch.dtype) -> None:
    """The interpreter cuts numbers off where it rounds to bfloat16, which costs twice as much as rounding to the nearest."""
    check(num_rows, width, STARTS[parts], rank, dtype, add_lora_triton_, roundings=2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Of few rows, whose product with A is split, and of many. Each product of the interpreter has an order of its own, so there
    numbers are small integers, whose sums are exact."""
    weights, num_rows = lora_weights(300, STARTS[3], 16, dtype), gpu.FEW_ROWS + 5
    x, y, slots = torch.randn(num_rows, 300).to(dtype), torch.randn(num_rows, 170).to(dtype), slots_of(num_rows)
    if INTERPRETED:
        for tensor, factor in ((weights.a, 16), (weights.b, 4), (weights.scales, 4), (x, 2), (y, 2)):
            tensor.mul_(factor).round_()
    whole = y.clone()
    add_lora_triton_(whole, x, slots, weights)
    for rows in (slice(0, 1), slice(3, 20), slice(num_rows - 1, num_rows)):
        alone = y[rows].clone()
        add_lora_triton_(alone, x[rows], slots[rows], weights)
        assert alone.equal(whole[rows])
    assert not whole.equal(y)
