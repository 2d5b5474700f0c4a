"""`policy_attention` and `add_block_mass` on CPUs, against the reference and against `paged_attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.checked import run_checked
from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.kernels.policy_case import PolicyCase, PolicySequence, make_policy_case
from tests.matrices import matrix
from transom_kernels.launch import prefer
from transom_kernels.paged_attention import paged_attention
from transom_kernels.policy_attention import PolicyBatch, add_block_mass, policy_attention
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference
from transom_kernels.quantised_kv import FORMATS, quantise_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPE = Shape(heads=6, kv_heads=2, size=24, block_size=16)
SEQUENCES = [
    PolicySequence(start=700, window=300, sinks=20, dropped=tuple(range(2, 25))),  # a window whose run has slid
    PolicySequence(start=700, count=40, window=300, sinks=20, dropped=tuple(range(2, 25))),  # the same for a prompt
    PolicySequence(start=0),
    PolicySequence(start=511, dropped=(1, 4, 5, 9, 30)),  # blocks gone from anywhere
    PolicySequence(start=513, count=3, sinks=40, dropped=(4, 5, 9, 30)),
    PolicySequence(start=90, count=20, window=7, sinks=3),
    PolicySequence(start=50, window=900, sinks=100),
]


def check(
    case: PolicyCase, *, with_sink_query: bool = False, sink_logits: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and mass of this device's implementation, compared with the reference's."""
    inputs = (case.q, case.k_cache, case.v_cache, case.batch)
    asked = {"scale": 0.3, "sink_q": case.sink_q if with_sink_query else None, **options}
    found, expected = (torch.full((*case.q.shape[:2], 2), float("nan")) for _ in range(2))
    out = policy_attention(*inputs, **asked, sink_logits=sink_logits, statistics=found)
    right = policy_attention_reference(*inputs, **asked, sink_logits=sink_logits, statistics=expected)
    limit = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.float(), right.float(), atol=limit, rtol=limit)
    mass, right_mass = (torch.full(case.batch.block_table.shape, 0.5) for _ in range(2))
    add_block_mass(mass, case.q, case.k_cache, case.batch, found, **asked)
    add_block_mass_reference(right_mass, case.q, case.k_cache, case.batch, expected, **asked)
    rows = (case.batch.query_offset[1:] - case.batch.query_offset[:-1]).float()
    torch.testing.assert_close(mass / rows[:, None], right_mass / rows[:, None], atol=limit, rtol=limit)
    if sink_logits is None:
        torch.testing.assert_close((mass - 0.5).sum(dim=1), rows * case.q.shape[1], atol=limit, rtol=limit)
    return out, mass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_sink_query", [False, True])
def test_tables_with_gaps_windows_and_sinks(dtype, with_sink_query):
    check(make_policy_case(SEQUENCES, replace(SHAPE, dtype=dtype)), with_sink_query=with_sink_query)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "v_size", "block_size"), [(1, 1, 16, 16, 4), (11, 1, 40, 96, 5), (2, 2, 33, 7, 24)]
)
def test_groups_widths_and_block_sizes(heads, kv_heads, size, v_size, block_size):
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=block_size)
    sequences = [PolicySequence(start=300, window=77, sinks=9, dropped=(3, 4)), PolicySequence(start=99, count=11)]
    check(make_policy_case(sequences, shape), with_sink_query=True)


@pytest.mark.parametrize(("soft_cap", "has_sink_logits"), matrix([None, 3.0], [False, True], strength=1))
def test_soft_cap_and_sink_logits(soft_cap, has_sink_logits):
    sink_logits = torch.tensor([-2.0, 0.0, 40.0, 1.0, float("-inf"), 3.0]) if has_sink_logits else None
    check(make_policy_case(SEQUENCES, SHAPE), soft_cap=soft_cap, sink_logits=sink_logits)


def compact(case: Any, window: int, sinks: int) -> PolicyBatch:
    """An ordinary batch as a compact one."""
    batch, columns = case.batch, case.batch.block_table.shape[1]
    first, logical = batch.first_block[:, None], torch.arange(columns)[None].expand(len(batch.start), -1)
    ahead = logical < batch.num_sink_blocks
    counts = batch.query_offset[1:] - batch.query_offset[:-1]
    return PolicyBatch(
        block_size=batch.block_size,
        block_table=batch.block_table,
        key_blocks=torch.where(ahead, logical, logical - batch.num_sink_blocks + first).int(),
        num_columns=(batch.block_table >= 0).sum(dim=1).int(),
        window=torch.full_like(batch.start, window),
        sinks=torch.full_like(batch.start, sinks),
        start=batch.start,
        query_offset=batch.query_offset,
        row_sequence=torch.repeat_interleave(torch.arange(len(counts)), counts).int(),
        count_host=counts.tolist(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_table_without_gaps_gives_the_bits_of_paged_attention(dtype):
    """So rows without a policy may be computed beside rows with one."""
    sequences = [Sequence(start=start, count=1) for start in (0, 15, 16, 255, 256, 600, 1023)]
    case = make_case([*sequences, Sequence(start=700, count=5)], replace(SHAPE, dtype=dtype))
    inputs = (case.q, case.k_cache, case.v_cache)
    expected = paged_attention(*inputs, case.batch, scale=0.3)
    assert torch.equal(policy_attention(*inputs, compact(case, 0, 0), scale=0.3), expected)
    prompts = make_case([Sequence(start=0, count=77), Sequence(start=700, count=140)], replace(SHAPE, dtype=dtype))
    inputs = (prompts.q, prompts.k_cache, prompts.v_cache)
    expected = paged_attention(*inputs, prompts.batch, scale=0.3)
    assert torch.equal(policy_attention(*inputs, compact(prompts, 0, 0), scale=0.3), expected)
    slid = [Sequence(start=900, count=1, first_key=601), Sequence(start=300, count=1, first_key=1)]
    case = make_case(slid, replace(SHAPE, dtype=dtype, num_sink_blocks=2))
    inputs = (case.q, case.k_cache, case.v_cache)
    expected = paged_attention(*inputs, case.batch, scale=0.3, window=300, num_sink_tokens=20)
    assert torch.equal(policy_attention(*inputs, compact(case, 300, 20), scale=0.3), expected)


@pytest.mark.parametrize("count", [1, 40])
def test_blocks_that_leave_outside_of_the_mask_change_no_bit(count):
    """A step may still have the blocks of the step before; the row's result does not show it."""
    sequence = PolicySequence(start=700, count=count, window=300, sinks=20)
    whole = make_policy_case([sequence], SHAPE)
    expected = policy_attention(whole.q, whole.k_cache, whole.v_cache, whole.batch, scale=0.3)
    columns = [column for column in range(whole.batch.block_table.shape[1] - 1) if column not in range(2, 25)]
    batch = replace(
        whole.batch,
        block_table=whole.batch.block_table[:, columns].contiguous(),
        key_blocks=whole.batch.key_blocks[:, columns].contiguous(),
        num_columns=torch.tensor([len(columns)], dtype=torch.int32),
    )
    assert torch.equal(policy_attention(whole.q, whole.k_cache, whole.v_cache, batch, scale=0.3), expected)


@pytest.mark.parametrize("with_sink_query", [False, True])
@pytest.mark.parametrize("sequence", [SEQUENCES[1], PolicySequence(start=0, count=300, window=90, sinks=20)], ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_chunks(sequence, with_sink_query):
    """And alone as beside other sequences; chunks have more than 8 tokens."""
    case = make_policy_case([PolicySequence(start=5, count=30), sequence], SHAPE)
    expected, _ = check(case, with_sink_query=with_sink_query)
    begin, end = 30, 30 + sequence.count
    for first, last in ((begin, begin + 9), (begin + 9, end - 11), (end - 11, end)):
        count = last - first
        batch = replace(
            case.batch,
            **{
                name: getattr(case.batch, name)[1:].contiguous()
                for name in ("block_table", "key_blocks", "num_columns", "window", "sinks")
            },
            start=torch.tensor([sequence.start + first - begin], dtype=torch.int32),
            query_offset=torch.tensor([0, count], dtype=torch.int32),
            row_sequence=torch.zeros(count, dtype=torch.int32),
            count_host=[count],
            scratch={},
        )
        out = policy_attention(
            case.q[first:last],
            case.k_cache,
            case.v_cache,
            batch,
            scale=0.3,
            sink_q=case.sink_q[first:last] if with_sink_query else None,
        )
        assert torch.equal(out, expected[first:last])


def test_a_row_has_the_same_bits_for_any_number_of_threads():
    case = make_policy_case(SEQUENCES, SHAPE)
    expected = check(case, with_sink_query=True)
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            out, mass = check(case, with_sink_query=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(mass, expected[1])


def test_torch_is_the_reference():
    with prefer("reference"):
        check(make_policy_case(SEQUENCES[:2], SHAPE), with_sink_query=True)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_caches_are_dequantised(stored, dtype):
    case = make_policy_case(SEQUENCES, replace(SHAPE, dtype=dtype))
    (k, k_scale), (v, v_scale) = (quantise_rows(cache, FORMATS[stored]) for cache in (case.k_cache, case.v_cache))
    inputs: dict[str, Any] = {"scale": 0.3, "sink_q": case.sink_q}
    found, expected = (torch.full((*case.q.shape[:2], 2), float("nan")) for _ in range(2))
    out = policy_attention(case.q, k, v, case.batch, **inputs, statistics=found, k_scale=k_scale, v_scale=v_scale)
    right = policy_attention_reference(
        case.q, k, v, case.batch, **inputs, statistics=expected, k_scale=k_scale, v_scale=v_scale
    )
    limit = max(TOLERANCE[dtype], 1e-3)  # integer products round queries and weights to 16 bits
    torch.testing.assert_close(out.float(), right.float(), atol=limit, rtol=limit)
    mass, right_mass = (torch.zeros(case.batch.block_table.shape) for _ in range(2))
    add_block_mass(mass, case.q, k, case.batch, found, **inputs, k_scale=k_scale)
    add_block_mass_reference(right_mass, case.q, k, case.batch, expected, **inputs, k_scale=k_scale)
    torch.testing.assert_close(mass, right_mass, atol=50 * limit, rtol=limit)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"q": torch.zeros(1, 5, 24)}, "be a multiple"), ({"q": torch.zeros(1, 6, 23)}, "widths must agree")],
)
def test_what_does_not_fit_is_refused(changed, words):
    case = make_policy_case([PolicySequence(start=9)], SHAPE)
    with pytest.raises(ValueError, match=words):
        policy_attention(changed["q"], case.k_cache, case.v_cache, case.batch, scale=1.0)
    with pytest.raises(ValueError, match="statistics has shape"):
        policy_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=1.0, statistics=torch.zeros(1, 6))
    with pytest.raises(ValueError, match="mass is"):
        add_block_mass(torch.zeros(2, 2), case.q, case.k_cache, case.batch, torch.zeros(1, 6, 2), scale=1.0)


def small_case() -> None:
    shape = replace(SHAPE, size=23, dtype=torch.bfloat16)
    check(make_policy_case(SEQUENCES[:4], shape), with_sink_query=True)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)
