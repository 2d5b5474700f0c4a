"""The CPU kernels of `paged_attention`: long contexts, quantised caches, odd widths, equal bits in any batch, recorded steps."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.how_many import ALL_TESTS
from tests.kernels.paged_case import TOLERANCE, Case, Sequence, Shape, make_case
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, quantised
from tests.matrices import some_daily
from transom_kernels.cpu.program import ReplayMemory, record_program
from transom_kernels.kv_write import Preparation, QkvInputs, prepare_qkv
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel, paged_attention_cpu
from transom_kernels.paged_attention.cpu.layout import KEY_TILE, UNIT_KEYS
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPE = Shape(block_size=16)
MASKS: list[dict[str, Any]] = [{}, {"window": 300}, {"chunk": 320}, {"window": 270, "num_sink_tokens": 30}]
FORMATS = ["", *FORMATS_BY_NAME]  # of caches; "": the dtype of the queries
MODELS = [("", F32), ("", BF16), ("fp8", F32)]  # kinds that tests of the tiny model compile as well, in heads of 16

# a kernel is compiled for each
every_kind = pytest.mark.parametrize(
    ("kv_format", "dtype"),
    some_daily(
        product(FORMATS, (F32, BF16, F16)),
        daily=[("", F32), ("", BF16), ("", F16), ("fp8", F32), ("int8", BF16), ("int4", F16)],
    ),
)


def shape_of(kv_format: str, dtype: torch.dtype) -> Shape:
    return replace(SHAPE, dtype=dtype, size=16 if (kv_format, dtype) in MODELS else SHAPE.size)


def caches_of(case: Case, kv_format: str, *, head_major: bool = True) -> dict[str, Any]:
    return quantised(case, FORMATS_BY_NAME[kv_format], head_major=head_major).arguments if kv_format else {}


def attend(inputs: PagedInputs) -> torch.Tensor:
    inputs.batch.scratch.clear()
    assert fits_cpu_kernel(inputs)
    return paged_attention_cpu(inputs)


def check(inputs: PagedInputs) -> torch.Tensor:
    """Stored numbers are exact in all products; where a processor multiplies 8-bit integers, queries and weights have 16 bits."""
    out, expected = attend(inputs), paged_attention_reference(inputs)
    assert bool(expected.isfinite().all())
    limit = max(TOLERANCE[inputs.q.dtype], 0.0 if inputs.k_scale is None else 3e-4)
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
    return out


@every_kind
def test_contexts_around_the_edges_of_units_and_key_tiles(kv_format: str, dtype: torch.dtype) -> None:
    ends = [edge + step for edge in (KEY_TILE, UNIT_KEYS, 3 * UNIT_KEYS) for step in (-1, 0, 1)]
    decoding = [Sequence(start=end - 1, count=1) for end in ends]
    prompts = [Sequence(start=end - 40, count=40) for end in ends[2::3]]
    shape = replace(shape_of(kv_format, dtype), head_major=dtype is not BF16)
    case = make_case([*decoding, *prompts, Sequence(start=250, count=3), Sequence(start=0, count=0)], shape)
    caches = caches_of(case, kv_format)
    for mask in MASKS:
        check(case.inputs(**caches, **mask))


@every_kind
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(kv_format: str, dtype: torch.dtype) -> None:
    """For any number of threads, and of slots that share a row."""
    sequences = [Sequence(start=900, count=1), Sequence(start=20, count=200), Sequence(start=700, count=2)]
    case = make_case(sequences, shape_of(kv_format, dtype))
    caches, mask = caches_of(case, kv_format), MASKS[3 if dtype is F32 else 0]
    expected = check(case.inputs(**caches, **mask))
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            assert torch.equal(attend(case.inputs(**caches, **mask)), expected)
    batch, row = case.batch, 0
    hosts = ("block_table_host", "first_block_host", "attend_from_host", "start_host", "count_host")
    for b, sequence in enumerate(sequences):
        names = ("block_table", "first_block", "attend_from", "start", *hosts)
        own = {name: getattr(batch, name)[b : b + 1] for name in names}
        offset = torch.tensor([0, sequence.count], dtype=torch.int32)
        rows = slice(row, row + sequence.count)
        alone = replace(case, q=case.q[rows], batch=replace(batch, **own, query_offset=offset, scratch={}))
        assert torch.equal(attend(alone.inputs(**caches, **mask)), expected[rows])
        row += sequence.count


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(dtype: torch.dtype) -> None:
    """Rows see the same key tiles, whichever rows are beside them."""
    case = make_case([Sequence(start=0, count=300)], shape_of("", dtype))
    expected = attend(case.inputs())
    for start, end in ((0, 50), (50, 300), (0, 129), (129, 300), (0, 160), (160, 300)):
        batch = replace(
            case.batch,
            start=torch.tensor([start], dtype=torch.int32),
            start_host=[start],
            query_offset=torch.tensor([0, end - start], dtype=torch.int32),
            count_host=[end - start],
            scratch={},
        )
        assert torch.equal(attend(replace(case, q=case.q[start:end], batch=batch).inputs()), expected[start:end])


def test_a_batch_without_host_lists_decodes_every_row() -> None:
    """As recorded steps do; also with more rows than are decoded otherwise, and with a sequence that has no row."""
    sequences = [Sequence(start=600, count=1), Sequence(start=30, count=1), Sequence(start=5, count=20)]
    case = make_case(sequences, shape_of("", F32))
    expected = check(case.inputs())
    batch = case.batch
    batch.query_offset = torch.tensor([0, 1, 2, 22, 22], dtype=torch.int32)
    for name in ("block_table", "first_block", "attend_from", "start"):
        values = getattr(batch, name)
        setattr(batch, name, torch.cat([values, values[:1]]))
    for name in ("block_table_host", "first_block_host", "attend_from_host", "start_host", "count_host"):
        setattr(batch, name, [])
    torch.testing.assert_close(attend(case.inputs()), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kv_format", FORMATS_BY_NAME)
def test_outliers_and_rows_of_very_different_sizes(kv_format: str) -> None:
    """Scales differ by token: one token's large key or value costs the others nothing."""
    dtype = {"fp8": F32, "int8": BF16, "int4": F16}[kv_format]
    case = make_case([Sequence(start=300, count=1), Sequence(start=5, count=30)], shape_of(kv_format, dtype))
    sizes = torch.logspace(-3, 1, case.v_cache.shape[0])[:, None, None, None]
    case.v_cache.mul_(sizes)
    case.k_cache.mul_(sizes.flip(0).clamp(max=1.0))
    caches = caches_of(case, kv_format)
    caches["v_scale"][0] = 0.0  # rows of zeros
    check(case.inputs(**caches))


SIZES = [(11, 1, 40, 96, 5), (2, 2, 33, 7, 5), (1, 1, 16, 16, 4), (2, 2, 34, 6, 1), (3, 1, 130, 70, 16)]


@pytest.mark.parametrize(
    ("kv_format", "sizes"),
    some_daily(
        [(kv_format, sizes) for kv_format in FORMATS for sizes in SIZES if sizes[2] % 2 == 0 or not kv_format],
        daily=[("", SIZES[0]), ("", SIZES[1]), ("int8", SIZES[0]), ("int4", SIZES[4])],
    ),
)
def test_soft_caps_sinks_groups_widths_and_block_sizes(kv_format: str, sizes: tuple[int, ...]) -> None:
    heads, kv_heads, size, v_size, block_size = sizes
    # float16 is never multiplied in pairs, and values of an int4 cache are, on all processors
    dtype = F32 if v_size == 96 else F16 if kv_format == "int4" else BF16
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=block_size, dtype=dtype)
    sequences = [Sequence(start=40, count=1), Sequence(start=3, count=21), Sequence(start=35, count=2, attend_from=34)]
    case = make_case(sequences, shape)
    caches = caches_of(case, kv_format, head_major=size != 40)
    check(case.inputs(**caches, soft_cap=3.0, sink_logits=torch.linspace(-2, 2, heads)))


def test_elements_that_are_not_adjacent_are_left_to_torch() -> None:
    case = make_case([Sequence(start=9, count=2)], SHAPE)
    shape = case.k_cache.shape
    apart = torch.empty(*shape[:3], 2 * shape[3])[..., ::2].copy_(case.k_cache)
    assert not fits_cpu_kernel(case.inputs(k_cache=apart))
    assert not fits_cpu_kernel(replace(case, q=torch.empty(2, 6, 48)[..., ::2]).inputs())


@torch.inference_mode()
def test_a_recorded_step_calls_nothing_but_kernels() -> None:
    case = make_case([Sequence(start=70, count=1), Sequence(start=9, count=1)], replace(SHAPE, dtype=BF16))
    caches, slots = caches_of(case, "int8"), case.batch.slots
    k, v = torch.randn(2, 2, 24).bfloat16(), torch.randn(2, 2, 24).bfloat16()

    def step() -> torch.Tensor:
        how = Preparation(hadamard=True)
        q = prepare_qkv(QkvInputs(q=case.q, k=k, v=v, slots=slots, preparation=how, **caches))
        return paged_attention(replace(case, q=q).inputs(**caches))

    program, result = record_program(step, ReplayMemory())
    assert program.num_calls == 0
    k.normal_()
    v.normal_()
    expected = step()
    result.fill_(float("nan"))
    program.replay()
    assert torch.equal(result, expected)


def small_case() -> None:
    sequences = [Sequence(start=600, count=1), Sequence(start=0, count=1), Sequence(start=30, count=50)]
    for kv_format in FORMATS if ALL_TESTS else ("", "int4"):
        for dtype in (F32, BF16) if ALL_TESTS else (BF16,):
            case = make_case(sequences, replace(SHAPE, size=22 if kv_format else 23, dtype=dtype))
            assert uses_cpu_kernels(case.q)
            check(case.inputs(**caches_of(case, kv_format), window=400, num_sink_tokens=3))
