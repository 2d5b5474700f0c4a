"""The CPU kernels of `paged_attention` over quantised KV caches, against the reference, and in recorded steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.how_many import ALL_TESTS
from tests.kernels.checked import run_checked, run_in_child
from tests.kernels.paged_case import Case, Sequence, Shape, make_case
from tests.kernels.quantised_case import FORMATS_BY_NAME, QuantisedCaches, quantised
from tests.matrices import matrix, some_daily
from transom_kernels.cpu.program import ReplayMemory, record_program
from transom_kernels.kv_write import Preparation, prepare_qkv
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel, paged_attention_cpu
from transom_kernels.paged_attention.cpu.layout import KEY_TILE, UNIT_KEYS
from transom_kernels.paged_attention.reference import paged_attention_reference

# Stored numbers are exact in all products; where a processor multiplies 8-bit integers, queries and weights have 16 bits.
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPE = Shape(block_size=16)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS: list[dict[str, Any]] = [{}, {"window": 300}, {"window": 270, "num_sink_tokens": 30, "chunk": 320}]


def attend(case: Case, caches: QuantisedCaches, **options: Any) -> torch.Tensor:
    case.batch.scratch.clear()
    return paged_attention_cpu(case.inputs(**caches.arguments, **options))


def check(case: Case, caches: QuantisedCaches, **options: Any) -> torch.Tensor:
    inputs = case.inputs(**caches.arguments, **options)
    assert fits_cpu_kernel(inputs)
    expected, limit = paged_attention_reference(inputs), TOLERANCE[case.q.dtype]
    assert bool(expected.isfinite().all())
    out = attend(case, caches, **options)
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
    return out


@pytest.mark.parametrize(("name", "dtype", "mask"), matrix(list(FORMATS_BY_NAME), DTYPES, MASKS, strength=1))
def test_contexts_around_the_edges_of_units_and_key_tiles(name: str, dtype: torch.dtype, mask: dict[str, Any]) -> None:
    ends = [edge + step for edge in (KEY_TILE, UNIT_KEYS, 3 * UNIT_KEYS) for step in (-1, 0, 1)]
    decoding = [Sequence(start=end - 1, count=1) for end in ends]
    prompts = [Sequence(start=end - 40, count=40) for end in ends[2::3]]
    case = make_case([*decoding, *prompts, Sequence(start=250, count=3)], replace(SHAPE, dtype=dtype))
    check(case, quantised(case, FORMATS_BY_NAME[name]), **mask)


SIZES = [(1, 1, 16, 16, 4), (11, 1, 40, 96, 5), (2, 2, 34, 6, 1), (3, 1, 130, 70, 16)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    some_daily(
        [(name, sizes) for name in FORMATS_BY_NAME for sizes in SIZES], daily=[("int8", SIZES[1]), ("int4", SIZES[3])]
    ),
)
def test_soft_caps_sinks_groups_widths_and_block_sizes(name: str, sizes: tuple[int, ...]) -> None:
    heads, kv_heads, size, v_size, block_size = sizes
    dtype = torch.float32 if v_size == 96 else torch.bfloat16
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=block_size, dtype=dtype)
    sequences = [Sequence(start=40, count=1), Sequence(start=3, count=21), Sequence(start=35, count=2, attend_from=34)]
    case = make_case([*sequences, Sequence(start=0, count=0)], shape)
    caches = quantised(case, FORMATS_BY_NAME[name], head_major=size != 40)
    check(case, caches, soft_cap=3.0, sink_logits=torch.linspace(-2, 2, heads))


@pytest.mark.parametrize(("name", "dtype"), matrix(list(FORMATS_BY_NAME), DTYPES, strength=1))
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(name: str, dtype: torch.dtype) -> None:
    sequences = [Sequence(start=900, count=1), Sequence(start=20, count=200), Sequence(start=700, count=2)]
    case = make_case(sequences, replace(SHAPE, dtype=dtype))
    caches = quantised(case, FORMATS_BY_NAME[name])
    expected = check(case, caches)
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            assert torch.equal(attend(case, caches), expected)
    batch = case.batch
    batch.query_offset, case.q = torch.tensor([0, 1, 1, 1], dtype=torch.int32), case.q[:1]
    batch.count_host = [1, 0, 0]
    assert torch.equal(attend(case, caches), expected[:1])


@pytest.mark.parametrize(("name", "dtype"), matrix(list(FORMATS_BY_NAME), DTYPES, strength=1))
def test_outliers_and_rows_of_very_different_sizes(name: str, dtype: torch.dtype) -> None:
    """Scales differ by token: one token's large key or value costs the others nothing."""
    case = make_case([Sequence(start=300, count=1), Sequence(start=5, count=30)], replace(SHAPE, dtype=dtype))
    sizes = torch.logspace(-3, 1, case.v_cache.shape[0])[:, None, None, None]
    case.v_cache.mul_(sizes)
    case.k_cache.mul_(sizes.flip(0).clamp(max=1.0))
    caches = quantised(case, FORMATS_BY_NAME[name])
    caches.v_scale[0] = 0.0  # rows of zeros
    check(case, caches)


@torch.inference_mode()
def test_a_recorded_step_calls_nothing_but_kernels() -> None:
    case = make_case([Sequence(start=70, count=1), Sequence(start=9, count=1)], replace(SHAPE, dtype=torch.bfloat16))
    caches = quantised(case, FORMATS_BY_NAME["int8"])
    k, v = torch.randn(2, 2, 24).bfloat16(), torch.randn(2, 2, 24).bfloat16()

    def step() -> torch.Tensor:
        q = prepare_qkv(
            case.q,
            k,
            v,
            slots=case.batch.slots,
            tables=None,
            preparation=Preparation(hadamard=True),
            **caches.arguments,
        )
        return paged_attention(q, batch=case.batch, scale=0.3, **caches.arguments)

    program, result = record_program(step, ReplayMemory())
    assert program.num_calls == 0
    k.normal_()
    v.normal_()
    expected = step()
    result.fill_(float("nan"))
    program.replay()
    assert torch.equal(result, expected)


def small_case() -> None:
    for name in FORMATS_BY_NAME if ALL_TESTS else ("int4",):
        for dtype in DTYPES[:2] if ALL_TESTS else DTYPES[1:2]:
            sequences = [Sequence(start=600, count=1), Sequence(start=0, count=1), Sequence(start=30, count=50)]
            case = make_case(sequences, replace(SHAPE, size=22, dtype=dtype))
            assert uses_cpu_kernels(case.q)
            check(case, quantised(case, FORMATS_BY_NAME[name]), window=400, num_sink_tokens=3)


def test_no_access_outside_of_its_memory() -> None:
    run_checked(small_case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cascadelake", "cooperlake", "znver4"])
def test_other_processors(processor: str) -> None:
    run_in_child(small_case, TRANSOM_CPU=processor)
