"""The CPU kernels of `paged_attention`: what `test_paged_attention.py` does not ask of every implementation."""

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.checked import run_checked, run_in_child
from tests.kernels.paged_case import Case, Sequence, Shape, make_case
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.paged_attention import cpu, paged_attention
from transom_kernels.paged_attention.cpu_layout import KEY_TILE, UNIT_KEYS
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.rule import MaskRule

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SHAPE = Shape(heads=6, kv_heads=2, size=24, block_size=16)


def attend(case: Case, **mask) -> torch.Tensor:
    case.batch.scratch.clear()
    return paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=0.3, **mask)


def check(case: Case, **mask) -> torch.Tensor:
    out = attend(case, **mask)
    expected = paged_attention_reference(
        case.q, case.k_cache, case.v_cache, case.batch, scale=0.3, rule=MaskRule(**mask)
    )
    limit = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
    return out


MASKS = [{}, {"window": 300}, {"chunk": 320}, {"window": 270, "num_sink_tokens": 30}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_contexts_around_the_edges_of_units_and_key_tiles(dtype, mask):
    ends = [edge + step for edge in (KEY_TILE, UNIT_KEYS, 3 * UNIT_KEYS) for step in (-1, 0, 1)]
    decoding = [Sequence(start=end - 1, count=1) for end in ends]
    prompts = [Sequence(start=end - 40, count=40) for end in ends[2::3]]
    case = make_case([*decoding, *prompts, Sequence(start=250, count=3)], Shape(**{**vars(SHAPE), "dtype": dtype}))
    check(case, **mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(dtype, mask):
    """Whatever the batch, the number of threads and the slots that share a row."""
    sequences = [Sequence(start=900, count=1), Sequence(start=20, count=200), Sequence(start=700, count=2)]
    case = make_case(sequences, Shape(**{**vars(SHAPE), "dtype": dtype}))
    expected = attend(case, **mask)
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            assert torch.equal(attend(case, **mask), expected)
    batch, row = case.batch, 0
    for b, sequence in enumerate(sequences):
        one = slice(b, b + 1)
        batch_of_one = type(batch)(
            block_size=batch.block_size,
            num_sink_blocks=0,
            block_table=batch.block_table[one],
            first_block=batch.first_block[one],
            attend_from=batch.attend_from[one],
            slots=batch.slots,
            query_offset=torch.tensor([0, sequence.count], dtype=torch.int32),
            start=batch.start[one],
            block_table_host=batch.block_table_host[one],
            first_block_host=batch.first_block_host[one],
            attend_from_host=batch.attend_from_host[one],
            start_host=batch.start_host[one],
            count_host=batch.count_host[one],
        )
        rows = slice(row, row + sequence.count)
        alone = Case(q=case.q[rows], k_cache=case.k_cache, v_cache=case.v_cache, batch=batch_of_one)
        assert torch.equal(attend(alone, **mask), expected[rows])
        row += sequence.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [50, 129, 160])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(dtype, cut):
    """Rows see the same key tiles, whichever rows are beside them."""
    shape = Shape(**{**vars(SHAPE), "dtype": dtype})
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
    counts = [Sequence(start=600, count=1), Sequence(start=30, count=1), Sequence(start=5, count=20)]
    case = make_case(counts, SHAPE)
    expected = check(case)
    batch = case.batch
    batch.query_offset = torch.tensor([0, 1, 2, 22, 22], dtype=torch.int32)
    for name in ("block_table", "first_block", "attend_from", "start"):
        values = getattr(batch, name)
        setattr(batch, name, torch.cat([values, values[:1]]))
    batch.block_table_host, batch.first_block_host, batch.attend_from_host = [], [], []
    batch.start_host, batch.count_host = [], []
    torch.testing.assert_close(attend(case), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "v_size"), [(1, 1, 16, 16), (11, 1, 40, 96), (2, 2, 33, 7)])
def test_groups_and_widths(heads, kv_heads, size, v_size):
    dtype = torch.bfloat16 if v_size != 96 else torch.float32
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=5, dtype=dtype)
    check(make_case([Sequence(start=40, count=1), Sequence(start=3, count=21)], shape))


def test_keys_whose_elements_are_not_adjacent_are_left_to_torch():
    case = make_case([Sequence(start=9, count=2)], SHAPE)
    shape = case.k_cache.shape
    case.k_cache = torch.empty(*shape[:3], 2 * shape[3])[..., ::2].copy_(case.k_cache)
    assert not cpu.fits_cpu_kernel(case.q, case.k_cache, case.v_cache, None)
    check(case)


def small_case() -> None:
    shape = Shape(**{**vars(SHAPE), "size": 23, "dtype": torch.bfloat16})
    sequences = [Sequence(start=600, count=1), Sequence(start=0, count=1), Sequence(start=30, count=50)]
    case = make_case(sequences, shape)
    assert uses_cpu_kernels(case.q)
    check(case, window=400, num_sink_tokens=3)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "cooperlake"])
def test_other_processors(processor):
    """Without vectors of 512 bits, and with pairs of bfloat16 but without tile registers."""
    run_in_child(small_case, TRANSOM_CPU=processor)
