"""The CPU kernels of `paged_attention`: long contexts, odd widths, equal bits in any batch and on any number of threads, memory."""

from dataclasses import replace

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.checked import run_checked, run_in_child
from tests.kernels.paged_case import TOLERANCE, Case, Sequence, Shape, make_case
from tests.matrices import matrix
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel, paged_attention_cpu
from transom_kernels.paged_attention.cpu.layout import KEY_TILE, UNIT_KEYS
from transom_kernels.paged_attention.reference import paged_attention_reference

SHAPE = Shape(block_size=16)
DTYPES = [torch.float32, torch.bfloat16]
MASKS = [{}, {"window": 300}, {"chunk": 320}, {"window": 270, "num_sink_tokens": 30}]


def attend(case: Case, **mask) -> torch.Tensor:
    case.batch.scratch.clear()
    return paged_attention_cpu(case.inputs(**mask))


def check(case: Case, **mask) -> torch.Tensor:
    inputs = case.inputs(**mask)
    assert fits_cpu_kernel(inputs)
    out, limit = attend(case, **mask), TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out, paged_attention_reference(inputs), atol=limit, rtol=limit)
    return out


@pytest.mark.parametrize(
    ("dtype", "mask", "head_major"), matrix([*DTYPES, torch.float16], MASKS, [True, False], strength=1)
)
def test_contexts_around_the_edges_of_units_and_key_tiles(dtype, mask, head_major):
    ends = [edge + step for edge in (KEY_TILE, UNIT_KEYS, 3 * UNIT_KEYS) for step in (-1, 0, 1)]
    decoding = [Sequence(start=end - 1, count=1) for end in ends]
    prompts = [Sequence(start=end - 40, count=40) for end in ends[2::3]]
    shape = replace(SHAPE, dtype=dtype, head_major=head_major)
    check(make_case([*decoding, *prompts, Sequence(start=250, count=3)], shape), **mask)


@pytest.mark.parametrize(("dtype", "mask"), matrix(DTYPES, MASKS, strength=1))
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(dtype, mask):
    """For any number of threads, and of slots that share a row."""
    sequences = [Sequence(start=900, count=1), Sequence(start=20, count=200), Sequence(start=700, count=2)]
    case = make_case(sequences, replace(SHAPE, dtype=dtype))
    expected = attend(case, **mask)
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            assert torch.equal(attend(case, **mask), expected)
    batch, row = case.batch, 0
    hosts = ("block_table_host", "first_block_host", "attend_from_host", "start_host", "count_host")
    for b, sequence in enumerate(sequences):
        names = ("block_table", "first_block", "attend_from", "start", *hosts)
        own = {name: getattr(batch, name)[b : b + 1] for name in names}
        offset = torch.tensor([0, sequence.count], dtype=torch.int32)
        rows = slice(row, row + sequence.count)
        alone = replace(case, q=case.q[rows], batch=replace(batch, **own, query_offset=offset, scratch={}))
        assert torch.equal(attend(alone, **mask), expected[rows])
        row += sequence.count


@pytest.mark.parametrize(("dtype", "cut"), matrix(DTYPES, [50, 129, 160], strength=1))
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(dtype, cut):
    """Rows see the same key tiles, whichever rows are beside them."""
    shape = replace(SHAPE, dtype=dtype)
    whole = make_case([Sequence(start=0, count=300)], shape)
    expected = attend(whole)
    for start, end in ((0, cut), (cut, 300)):
        part = make_case([Sequence(start=0, count=300)], shape)
        part.batch.start, part.batch.start_host = torch.tensor([start], dtype=torch.int32), [start]
        part.batch.query_offset = torch.tensor([0, end - start], dtype=torch.int32)
        part.batch.count_host = [end - start]
        part.q = part.q[start:end]
        assert torch.equal(attend(part), expected[start:end])


def test_a_batch_without_host_lists_decodes_every_row():
    """As recorded steps do; also with more rows than are decoded otherwise, and with a sequence that has no row."""
    case = make_case([Sequence(start=600, count=1), Sequence(start=30, count=1), Sequence(start=5, count=20)], SHAPE)
    expected = check(case)
    batch = case.batch
    batch.query_offset = torch.tensor([0, 1, 2, 22, 22], dtype=torch.int32)
    for name in ("block_table", "first_block", "attend_from", "start"):
        values = getattr(batch, name)
        setattr(batch, name, torch.cat([values, values[:1]]))
    batch.block_table_host, batch.first_block_host, batch.attend_from_host = [], [], []
    batch.start_host, batch.count_host = [], []
    torch.testing.assert_close(attend(case), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "v_size"), [(11, 1, 40, 96), (2, 2, 33, 7)])
def test_groups_and_widths(heads, kv_heads, size, v_size):
    dtype = torch.bfloat16 if v_size == 7 else torch.float32
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=5, dtype=dtype)
    check(make_case([Sequence(start=40, count=1), Sequence(start=3, count=21)], shape))


def test_elements_that_are_not_adjacent_are_left_to_torch():
    case = make_case([Sequence(start=9, count=2)], SHAPE)
    shape = case.k_cache.shape
    apart = torch.empty(*shape[:3], 2 * shape[3])[..., ::2].copy_(case.k_cache)
    assert not fits_cpu_kernel(case.inputs(k_cache=apart))
    assert not fits_cpu_kernel(replace(case, q=torch.empty(2, 6, 48)[..., ::2]).inputs())


def small_case() -> None:
    sequences = [Sequence(start=600, count=1), Sequence(start=0, count=1), Sequence(start=30, count=50)]
    case = make_case(sequences, replace(SHAPE, size=23, dtype=torch.bfloat16))
    assert uses_cpu_kernels(case.q)
    check(case, window=400, num_sink_tokens=3)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "cooperlake"])
def test_other_processors(processor):
    """Without vectors of 512 bits, and with pairs of bfloat16 but without tile registers."""
    run_in_child(small_case, TRANSOM_CPU=processor)
