"""`linear_recurrence` and `gated_rms_norm`: the CPU kernels against the reference in float64.

A case is a step in the middle of several sequences. Caches are NaN where nothing may be read.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.conftest import nan_memory
from tests.matrices import matrix
from transom_kernels.linear_recurrence import (
    Convolution,
    RecurrenceInputs,
    StateBatch,
    gated_rms_norm,
    linear_recurrence,
)
from transom_kernels.linear_recurrence.cpu.gated_norm import gated_rms_norm_cpu
from transom_kernels.linear_recurrence.cpu.recurrence import fits_cpu_kernels, linear_recurrence_cpu
from transom_kernels.linear_recurrence.inputs import GatedNorm
from transom_kernels.linear_recurrence.reference import gated_rms_norm_reference, linear_recurrence_reference

Recurrence = Callable[[RecurrenceInputs], torch.Tensor]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KDA = ("kda", "bounded kda")
KINDS = ["delta", "kda", "bounded kda", "mamba2", "mamba1"]
LIMIT = {F32: 2e-6, BF16: 1e-2, F16: 2e-3}  # of the largest number
SHAPES = [(3, 3, 16, 64, 4), (4, 2, 12, 20, 4), (6, 1, 33, 70, 2)]  # H, Hk, D, Dv, L
STEPS = [(0, 1), (5, 1), (0, 7), (1, 2), (3, 0), (2, 70), (64, 130), (0, 64)]  # tokens before and in the step
NORMS = pytest.mark.parametrize(
    ("group", "own_weights", "gates_first", "by_sigmoid", "dtype"),
    matrix([20, 60, None], [True, False], [True, False], [True, False], [F32, BF16]),
)


def recurrence_case(
    kind: str, shape: tuple[int, ...], steps: list[tuple[int, int]] = STEPS, dtype: torch.dtype = F32
) -> RecurrenceInputs:
    """Inputs for tokens before and in the step, from which `step_of` takes those of a step."""
    heads, key_heads, width, value_width, length = shape
    is_delta, by_column, by_row = kind in ("delta", *KDA), kind == "mamba1", kind in KDA
    key_heads, values = 1 if by_column else key_heads, heads * value_width
    tokens, keys = sum(map(sum, steps)), key_heads * width
    channels, num_blocks = values + (0 if by_column else 2 * keys), 2 * len(steps) + 1
    num_steps = heads * width if by_row else values if by_column else heads
    slab = torch.randn(tokens, channels + num_steps + heads + 2 * keys + 5).to(dtype)
    projected, step_size, strength, query, key, _ = torch.split(
        slab, [channels, num_steps, heads, keys, keys, 5], dim=1
    )
    states = torch.full((num_blocks, 7 + heads * (width * value_width + 3)), float("nan"))
    strides = (states.stride(0), width * value_width + 3, value_width, 1)
    convolution = Convolution(
        weight=(torch.randn(length, channels) / 2).to(dtype),
        bias=None if is_delta else torch.randn(channels).to(dtype),
        rows=torch.full((num_blocks, length, channels), float("nan")).to(dtype)[:, 1:],
    )
    return RecurrenceInputs(
        projected=projected,
        convolution=None if by_column else convolution,
        selection=(query, key) if by_column else None,
        step_size=step_size,
        step_bias=3 * torch.randn(num_steps),
        rate=torch.exp(torch.randn(*((heads, width, value_width) if by_column else (heads,))) - 1),
        strength=strength if is_delta else None,
        most_strength=2.0 if kind == "delta" else 1.0,
        most_decay=5.0 if kind == "bounded kda" else 0.0,
        skip=None if is_delta else torch.randn(num_steps),
        key_heads=key_heads,
        state=states.as_strided((num_blocks, heads, width, value_width), strides, 7),
        batch=batch_of([sum(step) for step in steps]),
    )


def rows_of(inputs: RecurrenceInputs) -> torch.Tensor:
    """The cached rows of the convolution, if the operator has one."""
    return torch.empty(len(inputs.state), 0) if inputs.convolution is None else inputs.convolution.rows


def batch_of(counts: list[int]) -> StateBatch:
    """Sequences that begin, and write blocks 1, 3, 5 and so on."""
    blocks = torch.arange(len(counts), dtype=torch.int32)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    return StateBatch(query_offset=offsets, read_block=torch.full_like(blocks, -1), write_block=2 * blocks + 1)


def step_of(case: RecurrenceInputs, begins: list[int], ends: list[int], *, in_place: bool = False) -> RecurrenceInputs:
    """The tokens [begin, end) of each sequence, which reads block 1, 3, 5... unless it begins, and writes it or block 2, 4, 6..."""
    offsets = case.batch.query_offset.tolist()
    rows = [torch.arange(first + a, first + b) for first, a, b in zip(offsets, begins, ends, strict=False)]
    kept = torch.cat(rows)
    batch = batch_of([b - a for a, b in zip(begins, ends, strict=True)])
    begins_before = torch.tensor(begins) > 0
    batch.read_block = torch.where(begins_before, batch.write_block, -1).int()
    batch.write_block = batch.write_block + (0 if in_place else 1)
    return replace(case, **tokens_of(case, kept), batch=batch)


def tokens_of(case: RecurrenceInputs, kept: Any) -> dict[str, Any]:
    """The case's tensors of tokens, for some tokens."""
    tensors = {name: getattr(case, name) for name in ("projected", "step_size", "strength")}
    found = {name: None if tensor is None else tensor[kept] for name, tensor in tensors.items()}
    return found | {"selection": case.selection and tuple(one[kept] for one in case.selection)}


def middle_step(case: RecurrenceInputs, steps: list[tuple[int, int]] = STEPS, **options: Any) -> RecurrenceInputs:
    """The step of a case, after the reference computed what comes before it."""
    begins, ends = [a for a, _ in steps], [a + b for a, b in steps]
    linear_recurrence_reference(step_of(case, [0] * len(steps), begins, in_place=True))
    return step_of(case, begins, ends, **options)


def own_caches(inputs: RecurrenceInputs) -> RecurrenceInputs:
    state, convolution = torch.empty_strided(inputs.state.shape, inputs.state.stride()), inputs.convolution
    own = convolution and replace(convolution, rows=convolution.rows.clone())
    return replace(inputs, state=state.copy_(inputs.state), convolution=own)


def check(inputs: RecurrenceInputs, compute: Recurrence, roundings: int = 1) -> None:
    """Compare results, written and untouched blocks with the reference in float64, over memory full of NaN.

    `roundings` is 2 where numbers are cut off instead of rounded, which moves them by up to twice as much.
    """
    wanted, got = own_caches(inputs), own_caches(inputs)
    results = linear_recurrence_reference(wanted, torch.float64)
    with nan_memory():
        out = compute(got)
    limit = roundings * LIMIT[inputs.projected.dtype]
    torch.testing.assert_close(out, results, atol=limit * float(results.abs().max()), rtol=limit)
    largest = float(wanted.state.nan_to_num(0.0).abs().max())
    torch.testing.assert_close(got.state, wanted.state, atol=limit * largest, rtol=limit, equal_nan=True)
    assert rows_of(got).nan_to_num(7.0).equal(rows_of(wanted).nan_to_num(7.0))


@pytest.mark.parametrize(("kind", "shape", "dtype"), matrix(KINDS, SHAPES, [F32, BF16, F16]))
def test_cpu_kernels_against_the_reference_in_float64(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = recurrence_case(kind, shape, dtype=dtype)
    assert fits_cpu_kernels(case)
    for in_place in (False, True):
        check(middle_step(case, in_place=in_place), linear_recurrence_cpu)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_same_bits_however_it_is_cut_and_whatever_is_beside_it(kind: str) -> None:
    """On CPUs at any position, with any number of threads."""
    case = recurrence_case(kind, (4, 2, 24, 40, 4), [(0, 150), (0, 9)])
    for threads in (1, 3):
        with kernel_threads(threads):
            check_cuts(case, linear_recurrence_cpu, ([1], [63], [64, 128], [2, 5, 149], list(range(1, 150))))


def check_cuts(case: RecurrenceInputs, compute: Recurrence, cuts_of_runs: Iterable[list[int]]) -> None:
    """The case's first prompt, cut at these tokens, has the bits that it has whole beside the second one."""
    ends = case.batch.query_offset.diff().tolist()
    whole = compute(step_of(case, [0, 0], ends))
    state, rows = case.state[2].clone(), rows_of(case)[2].clone()
    for cuts in cuts_of_runs:
        steps = zip([0, *cuts], [*cuts, ends[0]], strict=True)
        parts = [compute(step_of(case, [begin], [end], in_place=True)) for begin, end in steps]
        assert torch.cat(parts).equal(whole[: ends[0]]), cuts
        assert case.state[1].equal(state)
        assert rows_of(case)[1].equal(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_pad_a_step_give_zeros_and_a_state_without_a_block_is_not_kept(kind: str) -> None:
    check_padding(kind, linear_recurrence_cpu)
    check_padding(kind, linear_recurrence_reference)


def check_padding(kind: str, compute: Recurrence, num_tokens: int = 70, dtype: torch.dtype = F32) -> None:
    case = recurrence_case(kind, (4, 2, 12, 20, 4), [(0, num_tokens), (0, 1), (0, 5)], dtype)
    inputs = step_of(case, [0, 0], [num_tokens, 1])
    inputs.batch.write_block[:] = torch.tensor([-1, 4])
    extra: dict[str, Any] = {
        name: torch.cat([tensor, tensor[:3] * float("nan")])
        for name in ("projected", "step_size", "strength")
        if (tensor := getattr(inputs, name)) is not None
    }
    if inputs.selection is not None:
        extra["selection"] = tuple(torch.cat([one, one[:3] * float("nan")]) for one in inputs.selection)
    with nan_memory():
        wanted, padded = compute(inputs), compute(replace(inputs, **extra))
    assert padded[:-3].equal(wanted)
    assert not padded[-3:].any()
    assert case.state.isnan().flatten(1).all(1).tolist() == [block != 4 for block in range(len(case.state))]


def test_what_does_not_fit_is_refused() -> None:
    case, selective = (recurrence_case(kind, (4, 2, 12, 20, 4)) for kind in ("delta", "mamba1"))
    assert case.convolution is not None
    convolution = replace(case.convolution, weight=case.convolution.weight.half())
    for change, message in (
        ({"key_heads": 3}, "128 channels do not fit 3 key heads"),
        ({"rate": torch.zeros(3)}, r"rate is \(3,\); it must be \(4,\)"),
        ({"convolution": convolution}, "of one dtype"),
        ({"skip": torch.zeros(4).half()}, "must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_recurrence(replace(case, **change))
    with pytest.raises(ValueError, match="neither a convolution nor a delta rule"):
        linear_recurrence(replace(selective, strength=selective.step_size[:, :4]))
    for gates, weight, group in ((8, None, 3), (4, None, 4), (2, torch.ones(4), 4)):
        with pytest.raises(ValueError, match=f"groups of {group}"):
            gated_rms_norm(torch.zeros(2, 8), torch.zeros(2, gates), weight, 1e-6, group=group)


@NORMS
def test_gated_norm(
    group: int | None, own_weights: bool, gates_first: bool, by_sigmoid: bool, dtype: torch.dtype
) -> None:
    check_norm(gated_rms_norm_cpu, group, own_weights, gates_first, by_sigmoid, dtype)


def check_norm(
    compute: Callable[[GatedNorm], torch.Tensor],
    group: int | None,
    own_weights: bool,
    gates_first: bool,
    by_sigmoid: bool,
    dtype: torch.dtype,
) -> None:
    """`x` and `gate` are slices; without a group of its own there is no weight."""
    x, gate = torch.randn(40, 200).to(dtype)[:, 13:133], torch.randn(40, 130).to(dtype)[:, 10:]
    weight = None if group is None else torch.randn(120 if own_weights else group).to(dtype)
    norms = [GatedNorm(x, gate, weight, 1e-3, group or 120, gates_first, by_sigmoid)]
    if weight is None:  # and with a gate for each three or 24 numbers
        norms += [GatedNorm(x, gate[:, : 120 // size], None, 0.0, size, gates_first, by_sigmoid) for size in (3, 24)]
    for norm in norms:
        wanted = gated_rms_norm_reference(norm)
        with nan_memory():
            got = compute(norm)
        torch.testing.assert_close(got, wanted, atol=LIMIT[dtype], rtol=LIMIT[dtype])


def small_case() -> None:
    for kind in KINDS:
        check(middle_step(recurrence_case(kind, SHAPES[2], dtype=BF16)), linear_recurrence_cpu)
    check_norm(gated_rms_norm_cpu, 60, True, True, False, BF16)
