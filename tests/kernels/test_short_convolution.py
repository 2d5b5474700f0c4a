"""The gated short convolution against torch's `conv1d` over whole sequences: torch's operator and the CPU kernel.

Rows of tokens before the step are in a cache that is NaN everywhere else; gates are powers of two, so that rows are exact.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.paged_case import Case, Sequence, Shape, make_case
from tests.matrices import matrix
from transom_kernels.short_convolution import ConvolutionInputs, short_convolution
from transom_kernels.short_convolution.cpu import fits_cpu_kernel, short_convolution_cpu
from transom_kernels.short_convolution.reference import short_convolution_reference

Convolution = Callable[[ConvolutionInputs], torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SEQUENCES = [
    Sequence(start=0, count=1),
    Sequence(start=17, count=1, first_key=12),  # the blocks that its window left are gone
    Sequence(start=0, count=9),
    Sequence(start=6, count=2),
    Sequence(start=10, count=5, attend_from=9),  # the rows below 9 count as zero
    Sequence(start=1, count=1),
]


def convolution_case(
    length: int, width: int, *, units: int = 3, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Case, ConvolutionInputs]:
    """Inputs with `units` units of `width` channels; the rows that the step writes are NaN in the cache."""
    case = make_case(SEQUENCES, Shape(kv_heads=units, size=width, dtype=dtype))
    rows = torch.cat([keys[s.start :] for s, keys in zip(SEQUENCES, case.keys, strict=True)]).flatten(1)
    gate_in = 2.0 ** torch.randint(-1, 2, rows.shape)
    projected = torch.cat([gate_in, torch.randn_like(rows), rows / gate_in], dim=1).to(dtype)
    slots = case.batch.slots
    case.k_cache[slots // 4, slots % 4] = float("nan")
    return case, ConvolutionInputs(
        projected=projected,
        weight=torch.randn(length, units * width).to(dtype),
        bias=torch.randn(units * width).to(dtype) if bias else None,
        cache=case.k_cache,
        batch=case.batch,
    )


def check(case: Case, inputs: ConvolutionInputs, convolution: Convolution) -> None:
    """Compare results and written rows with each whole sequence's."""
    dtype, channels, length = inputs.projected.dtype, inputs.channels, len(inputs.weight)
    out = convolution(inputs)
    gates, bias = inputs.projected[:, channels : 2 * channels].float(), inputs.bias
    weight, begin = inputs.weight.float().T[:, None].contiguous(), 0
    for s, keys in zip(SEQUENCES, case.keys, strict=True):
        rows = keys.flatten(1).clone()
        rows[: s.attend_from] = 0.0
        padded = F.pad(rows.T, (length - 1, 0))
        wanted = F.conv1d(padded, weight, None if bias is None else bias.float(), groups=channels).T[s.start :]
        own = slice(begin, begin + s.count)
        torch.testing.assert_close(out[own].float(), gates[own] * wanted, atol=LIMIT[dtype], rtol=LIMIT[dtype])
        slots = inputs.batch.slots[own]
        assert inputs.cache[slots // 4, slots % 4].float().equal(keys[s.start :])
        begin += s.count


@pytest.mark.parametrize(("length", "width", "bias", "dtype"), matrix([1, 2, 3, 5], [16, 5, 40], [True, False], DTYPES))
def test_against_whole_sequences(length: int, width: int, bias: bool, dtype: torch.dtype) -> None:
    for convolution in (short_convolution_reference, short_convolution_cpu):
        case, inputs = convolution_case(length, width, bias=bias, dtype=dtype)
        assert fits_cpu_kernel(inputs)
        check(case, inputs, convolution)


def test_tokens_that_pad_a_step_belong_to_no_sequence_and_masked_tokens_are_not_written() -> None:
    case, inputs = convolution_case(3, 16)
    wanted = short_convolution_cpu(inputs)
    padded = replace(inputs, projected=torch.cat([inputs.projected, torch.randn(2, 3 * 48)]))
    padded.batch.slots = torch.cat([case.batch.slots, torch.tensor([-1, -1])])
    assert short_convolution_cpu(padded)[:-2].equal(wanted)


def test_what_does_not_fit_is_refused() -> None:
    _, inputs = convolution_case(3, 16)
    with pytest.raises(ValueError, match="a cached row of all channels"):
        short_convolution(replace(inputs, weight=torch.zeros(3, 47)))
    with pytest.raises(ValueError, match="tensors of one dtype"):
        short_convolution(replace(inputs, weight=inputs.weight.half()))


def small_case() -> None:
    case, inputs = convolution_case(3, 20, dtype=torch.bfloat16)
    check(case, inputs, short_convolution_cpu)
