"""The CPU kernels over quantised KV caches: attention, `kv_write` and `prepare_qkv` against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.how_many import ALL_TESTS
from tests.kernels.checked import run_checked, run_in_child
from tests.kernels.paged_case import Case, Sequence, Shape, make_case
from tests.kernels.quantised_case import FORMATS_BY_NAME, QuantisedCaches, poisoned_caches, quantised
from tests.matrices import matrix
from transom_kernels.cpu.program import ReplayMemory, record_program
from transom_kernels.kv_write import Preparation, kv_write, prepare_qkv
from transom_kernels.kv_write.cpu import prepare_qkv_fits
from transom_kernels.kv_write.hadamard import rotate_heads
from transom_kernels.kv_write.prepare import prepare_qkv_reference
from transom_kernels.kv_write.reference import kv_write_reference
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.cpu import fits_cpu_kernel
from transom_kernels.paged_attention.cpu_layout import KEY_TILE, UNIT_KEYS
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import dequantise_rows

# Stored numbers are exact in all products; where a processor multiplies 8-bit integers, queries and weights have 16 bits.
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPE = Shape(heads=6, kv_heads=2, size=24, block_size=16)
every_format = pytest.mark.parametrize("name", FORMATS_BY_NAME)


def attend(case: Case, caches: QuantisedCaches, **options: Any) -> torch.Tensor:
    case.batch.scratch.clear()
    assert fits_cpu_kernel(case.q, caches.k, caches.v, None)
    arguments: dict[str, Any] = {**caches.arguments, **options}
    return paged_attention(case.q, batch=case.batch, scale=0.3, **arguments)


def check(case: Case, caches: QuantisedCaches, **options: Any) -> torch.Tensor:
    out = attend(case, caches, **options)
    rule = MaskRule(**{key: options.pop(key) for key in ("window", "num_sink_tokens", "chunk") if key in options})
    inputs = (case.q, caches.k, caches.v, case.batch)
    expected = paged_attention_reference(*inputs, scale=0.3, rule=rule, kv_scales=caches.scales, **options)
    assert bool(expected.isfinite().all())
    limit = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
    return out


MASKS: list[dict[str, Any]] = [
    {},
    {"window": 300, "soft_cap": 3.0},
    {"chunk": 320, "sink_logits": torch.linspace(-2, 2, 6)},
    {"window": 270, "num_sink_tokens": 30},
]


@pytest.mark.parametrize(
    ("name", "dtype", "mask"),
    matrix(list(FORMATS_BY_NAME), [torch.float32, torch.bfloat16, torch.float16], range(4), strength=1),
)
def test_contexts_around_the_edges_of_units_and_key_tiles(name: str, dtype: torch.dtype, mask: int) -> None:
    ends = [edge + step for edge in (KEY_TILE, UNIT_KEYS, 3 * UNIT_KEYS) for step in (-1, 0, 1)]
    decoding = [Sequence(start=end - 1, count=1) for end in ends]
    prompts = [Sequence(start=end - 40, count=40) for end in ends[2::3]]
    case = make_case([*decoding, *prompts, Sequence(start=250, count=3)], replace(SHAPE, dtype=dtype))
    check(case, quantised(case, FORMATS_BY_NAME[name]), **MASKS[mask])


@pytest.mark.parametrize(
    ("name", "sizes"),
    matrix(
        list(FORMATS_BY_NAME),
        [(1, 1, 16, 16, 4), (11, 1, 40, 96, 5), (2, 2, 34, 6, 1), (3, 1, 130, 70, 16)],
        strength=1,
    ),
)
def test_groups_widths_and_block_sizes(name: str, sizes: tuple[int, ...]) -> None:
    heads, kv_heads, size, v_size, block_size = sizes
    dtype = torch.float32 if v_size == 96 else torch.bfloat16
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=block_size, dtype=dtype)
    sequences = [Sequence(start=40, count=1), Sequence(start=3, count=21), Sequence(start=35, count=2, attend_from=34)]
    case = make_case([*sequences, Sequence(start=0, count=0)], shape)
    check(case, quantised(case, FORMATS_BY_NAME[name], head_major=size != 40))


@pytest.mark.parametrize(("name", "dtype"), matrix(list(FORMATS_BY_NAME), [torch.bfloat16, torch.float32], strength=1))
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


@every_format
def test_outliers_and_rows_of_very_different_sizes(name: str) -> None:
    """Scales differ by token: one token's large key or value costs the others nothing."""
    case = make_case([Sequence(start=300, count=1), Sequence(start=5, count=30)], SHAPE)
    sizes = torch.logspace(-3, 1, case.v_cache.shape[0])[:, None, None, None]
    case.v_cache.mul_(sizes)
    case.k_cache.mul_(sizes.flip(0).clamp(max=1.0))
    caches = quantised(case, FORMATS_BY_NAME[name])
    caches.v_scale[0] = 0.0  # rows of zeros
    check(case, caches)


def assert_written(got: QuantisedCaches, wanted: QuantisedCaches, *, step: int) -> None:
    """Equal scales, and stored numbers that are at most `step` apart; what was not written is untouched."""
    for name in ("k", "v"):
        scale, wanted_scale = getattr(got, f"{name}_scale"), getattr(wanted, f"{name}_scale")
        torch.testing.assert_close(scale, wanted_scale, rtol=3e-6 * step, atol=0, equal_nan=True)
        stored, wanted_stored = getattr(got, name), getattr(wanted, name)
        if step == 0 or stored.dtype == torch.float8_e4m3fn:
            away = (stored.view(torch.uint8).int() - wanted_stored.view(torch.uint8).int()).abs()  # e4m3 counts upwards
            assert int(away.max()) <= step
        else:
            away = dequantise_rows(stored, torch.ones_like(scale)) - dequantise_rows(
                wanted_stored, torch.ones_like(scale)
            )
            assert float(away.abs().max()) <= step


@pytest.mark.parametrize(("name", "dtype"), matrix(list(FORMATS_BY_NAME), [torch.bfloat16, torch.float32], strength=1))
def test_kv_write_has_the_bits_of_the_reference(name: str, dtype: torch.dtype) -> None:
    kv_format = FORMATS_BY_NAME[name]
    for size, v_size, head_major in ((20, 12, True), (64, 50, False)):
        wanted, got = (poisoned_caches(kv_format, 8, 4, 3, (size, v_size), head_major=head_major) for _ in range(2))
        k = (torch.randn(20, 3, size) * torch.logspace(-12, 9, 20)[:, None, None]).to(dtype)
        v = torch.randn(20, 3, v_size).to(dtype)
        k[3], k[4, 1, 5], v[5, 0, 1], v[6, 2] = 0.0, float("nan"), float("-inf"), 0.0
        v[7, 0, 0] = 1e3  # beside it small numbers, some of them too small for the format
        slots = torch.randperm(32)[:20]
        kv_write_reference(k, v, wanted.k, wanted.v, slots, wanted.scales)
        kv_write(k, v, got.k, got.v, slots, k_scale=got.k_scale, v_scale=got.v_scale)
        assert_written(got, wanted, step=0)


def prepare_case(name: str, dtype: torch.dtype, width: int, how: Preparation) -> None:
    kv_format = FORMATS_BY_NAME[name]
    wanted, got = (poisoned_caches(kv_format, 5, 4, 2, (width, width - 4)) for _ in range(2))
    row = torch.randn(4, 10 * width).to(dtype)
    q, k = row[:, : 6 * width].unflatten(1, (6, width)), row[:, 6 * width : 8 * width].unflatten(1, (2, width))
    v = row[:, 8 * width : 10 * width - 8].unflatten(1, (2, width - 4))
    tables = (torch.randn(4, width).to(dtype), torch.randn(4, width).to(dtype))
    slots = torch.tensor([7, -1, 0, 19])
    caches = {"k_scale": got.k_scale, "v_scale": got.v_scale}
    assert prepare_qkv_fits(q, k, v, got.k, got.v, slots, tables, how)
    expected = prepare_qkv_reference(q, k, v, wanted.k, wanted.v, slots, tables, how, None, wanted.scales)
    queries = prepare_qkv(q, k, v, got.k, got.v, slots, tables, how, **caches)
    torch.testing.assert_close(queries, expected, rtol=2**-7, atol=1e-5)
    assert_written(got, wanted, step=1)  # norms and rotation add in another order than torch


@pytest.mark.parametrize(("name", "dtype"), matrix(list(FORMATS_BY_NAME), [torch.float32, torch.bfloat16], strength=1))
def test_prepare_qkv(name: str, dtype: torch.dtype) -> None:
    prepare_case(name, dtype, 40, Preparation(norm=True, norm_after_rotation=True, value_norm=True, value_factor=1.3))
    prepare_case(name, dtype, 20, Preparation(value_factor=0.5))


@pytest.mark.parametrize("width", [20, 40, 48, 128])
def test_the_hadamard_rotation(width: int) -> None:
    """Of blocks of 4, 8, 16 and 128: below a vector, a vector, several."""
    prepare_case("int4", torch.float32, width, Preparation(norm=True, norm_after_rotation=True, hadamard=True))
    q, slots = torch.randn(3, 2, width).bfloat16(), torch.zeros(3, dtype=torch.int64)
    out = prepare_qkv(q, None, None, None, None, slots, None, Preparation(hadamard=True))
    torch.testing.assert_close(out, rotate_heads(q), atol=1e-2, rtol=2**-7)


@every_format
def test_keys_alone_are_quantised(name: str) -> None:
    wanted, got = (poisoned_caches(FORMATS_BY_NAME[name], 2, 4, 1, (12, 12)) for _ in range(2))
    q, k, slots = torch.randn(3, 5, 12), torch.randn(3, 1, 12), torch.tensor([6, -1, 1])
    prepare_qkv_reference(q, k, None, wanted.k, None, slots, None, Preparation(), None, (wanted.k_scale, None))
    prepare_qkv(q, k, None, got.k, None, slots, None, k_scale=got.k_scale)
    assert_written(got, wanted, step=0)


@torch.inference_mode()
def test_a_recorded_step_calls_nothing_but_kernels() -> None:
    case = make_case([Sequence(start=70, count=1), Sequence(start=9, count=1)], replace(SHAPE, dtype=torch.bfloat16))
    caches = quantised(case, FORMATS_BY_NAME["int4"])
    k, v = torch.randn(2, 2, 24).bfloat16(), torch.randn(2, 2, 24).bfloat16()
    scales: dict[str, Any] = {"k_scale": caches.k_scale, "v_scale": caches.v_scale}

    def step() -> torch.Tensor:
        how = Preparation(hadamard=True)
        q = prepare_qkv(case.q, k, v, caches.k, caches.v, case.batch.slots, None, how, **scales)
        return paged_attention(q, caches.k, caches.v, case.batch, scale=0.3, **scales)

    program, result = record_program(step, ReplayMemory())
    assert program.num_calls == 0
    k.normal_()
    v.normal_()
    expected = step()
    result.fill_(float("nan"))
    program.replay()
    assert torch.equal(result, expected)


def small_case() -> None:
    for name in FORMATS_BY_NAME:
        prepare_case(name, torch.bfloat16, 22, Preparation(norm=True, hadamard=True))
    for name in FORMATS_BY_NAME:
        for dtype in (torch.bfloat16, torch.float32) if ALL_TESTS else (torch.bfloat16,):
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
