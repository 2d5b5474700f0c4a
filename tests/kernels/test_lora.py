"""`add_lora_` against its formula in float64: torch's operator and the CPU kernel.

Rows of x and y lie in wider rows of NaN. Some rows have no adapter; neighbouring rows have different ones.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from tests.kernels.test_small_operators_cpu import strided
from tests.matrices import matrix
from transom_kernels.lora import LoraWeights, add_lora_
from transom_kernels.lora.cpu import add_lora_cpu_
from transom_kernels.lora.reference import add_lora_reference_

Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LoraWeights], None]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SLOTS = 5
STARTS = {1: (0, 70), 3: (0, 150, 163, 170)}  # parts -> their columns: wider and narrower than vectors
ROUNDING = {F32: 2e-6, BF16: 2**-8, F16: 2**-11}  # of a number of the dtype; sums in float32 have another order


def lora_weights(width: int, starts: Sequence[int], rank: int, dtype: torch.dtype, slots: int = SLOTS) -> LoraWeights:
    parts = len(starts) - 1
    a = (torch.randn(slots, parts * rank, width) / width**0.5).to(dtype)
    b = (torch.randn(slots, rank, starts[-1]) / rank**0.5).to(dtype)
    return LoraWeights(a, b, torch.rand(slots, parts) + 0.5, tuple(starts))


def slots_of(num_rows: int, slots: int = SLOTS) -> torch.Tensor:
    """A slot for each row: runs of one slot, then all slots in turn and rows without one; a row alone has a slot."""
    mixed = torch.randint(-1, slots, (num_rows,), dtype=torch.int32)
    mixed[: num_rows // 2 + 1] = slots - 1
    return mixed


def changed(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, weights: LoraWeights) -> torch.Tensor:
    """The sum in float64, row by row."""
    out = y.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            inner = weights.a[slot].double() @ x[row].double()
            for part, (first, end) in enumerate(pairwise(weights.starts)):
                own = inner[part * weights.rank : (part + 1) * weights.rank]
                out[row, first:end] += weights.scales[slot, part].double() * (
                    own @ weights.b[slot, :, first:end].double()
                )
    return out


def check(
    num_rows: int, width: int, starts: Sequence[int], rank: int, dtype: torch.dtype, add: Add, roundings: int = 1
) -> None:
    """Compare results with the formula; rows without an adapter must not change."""
    weights, slots = lora_weights(width, starts, rank, dtype), slots_of(num_rows)
    x, y = strided(num_rows, width, dtype), strided(num_rows, starts[-1], dtype)
    wanted, before = changed(y, x, slots, weights), y.clone()
    add(y, x, slots, weights)
    assert y[slots < 0].equal(before[slots < 0])
    torch.testing.assert_close(y.double(), wanted, rtol=roundings * ROUNDING[dtype], atol=4e-6)


@pytest.mark.parametrize("add", [add_lora_reference_, add_lora_cpu_])
@pytest.mark.parametrize(
    ("num_rows", "width", "parts", "rank", "dtype"),
    matrix([1, 3, 17, 70], [50, 96], list(STARTS), [8, 16, 64, 256], [F32, BF16, F16]),
)
def test_against_the_formula(num_rows: int, width: int, parts: int, rank: int, dtype: torch.dtype, add: Add) -> None:
    check(num_rows, width, STARTS[parts], rank, dtype, add)


def test_what_does_not_fit_is_refused() -> None:
    weights, x, slots = lora_weights(50, STARTS[3], 8, F32), torch.randn(4, 50), slots_of(4)
    for y, other, own_slots, message in (
        (torch.randn(4, 169), x, slots, "y, x and the scales' slots and parts need"),
        (torch.randn(4, 170), x[:, 1:], slots, "y, x and the scales' slots and parts need"),
        (torch.randn(4, 170).half(), x, slots, "give one dtype"),
        (torch.randn(4, 170), x, slots.long(), "slots in int32"),
    ):
        with pytest.raises(ValueError, match=message):
            add_lora_(y, other, own_slots, weights)


def small_case() -> None:
    check(5, 50, STARTS[3], 8, BF16, add_lora_cpu_)
