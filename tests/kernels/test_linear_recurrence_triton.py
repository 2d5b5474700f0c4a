"""The Triton kernels of recurrent layers, their norms and convolutions, in the interpreter (or on a GPU where there is one)."""

import pytest
import torch

from tests.kernels.test_linear_recurrence import (
    BF16,
    F16,
    F32,
    KDA,
    KINDS,
    NORMS,
    SHAPES,
    check,
    check_cuts,
    check_norm,
    check_padding,
    middle_step,
    recurrence_case,
    step_of,
)
from tests.kernels.test_short_convolution import check as check_convolution, convolution_case
from tests.matrices import matrix
from transom_kernels.launch import INTERPRETED
from transom_kernels.linear_recurrence import gpu
from transom_kernels.linear_recurrence.gpu import gated_rms_norm_triton, linear_recurrence_triton
from transom_kernels.short_convolution import gpu as short_convolution
from transom_kernels.short_convolution.gpu import short_convolution_triton

STEPS = [(0, 1), (5, 1), (1, 2), (3, 0), (2, 35), (0, 7)]  # tokens before and in the step


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs of everything."""
    monkeypatch.setattr(gpu, "BLOCK_SEQUENCES", 4)
    monkeypatch.setattr(gpu, "BLOCK_CHANNELS", 64)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "in_place"), matrix(KINDS, SHAPES, [F32, BF16, F16], [False, True], strength=1)
)
def test_against_the_reference_in_float64(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, in_place: bool
) -> None:
    case = recurrence_case(kind, shape, STEPS, dtype)
    is_cut_off = INTERPRETED and dtype is BF16
    # Mamba-2's results are larger: they have a skip, the convolution a bias.
    roundings = 2 if is_cut_off and kind == "mamba2" else 1
    check(middle_step(case, STEPS, in_place=in_place), linear_recurrence_triton, roundings)
    if not is_cut_off:
        check(step_of(case, [0, 0, 0], [0, 0, 2]), linear_recurrence_triton)  # fewer tokens than sequences


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_same_bits_if_it_is_cut_at_multiples_of_16_and_whatever_is_beside_it(
    kind: str, dtype: torch.dtype
) -> None:
    case = recurrence_case(kind, (2, 1, 24, 20, 4), [(0, 35), (0, 9)], dtype)
    check_cuts(case, linear_recurrence_triton, ([16], [1, 6] if dtype == F32 else [16, 32]))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_pad_a_step_give_zeros_and_a_state_without_a_block_is_not_kept(
    kind: str, dtype: torch.dtype
) -> None:
    check_padding(kind, linear_recurrence_triton, num_tokens=20, dtype=dtype)


def test_decays_of_rows_in_chunks() -> None:
    """Every day in float16, where an error of more than its rounding shows."""
    for kind in KDA:
        check(middle_step(recurrence_case(kind, SHAPES[1], STEPS, F16), STEPS), linear_recurrence_triton)


@NORMS
def test_gated_norm(
    group: int | None, own_weights: bool, gates_first: bool, by_sigmoid: bool, dtype: torch.dtype
) -> None:
    check_norm(gated_rms_norm_triton, group, own_weights, gates_first, by_sigmoid, dtype)


@pytest.mark.parametrize(
    ("length", "width", "bias", "dtype"), matrix([1, 3, 4], [16, 5], [True, False], [F32, BF16, F16])
)
def test_convolutions_against_whole_sequences(
    monkeypatch: pytest.MonkeyPatch, length: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(short_convolution, "BLOCK_SEQUENCES", 4)  # fewer than sequences
    monkeypatch.setattr(short_convolution, "BLOCK_CHANNELS", 32)
    check_convolution(*convolution_case(length, width, bias=bias, dtype=dtype), short_convolution_triton)
