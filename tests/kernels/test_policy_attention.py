"""`policy_attention` and `add_block_mass` on CPUs, over random compact block tables in a cache that is NaN everywhere else: against
the reference (`check_policy`, which the Triton kernels' tests call, too) and against `paged_attention`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.paged_case import TOLERANCE, Case, Sequence, Shape, make_case
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, quantised
from tests.matrices import some_daily
from transom_kernels.paged_attention import paged_attention
from transom_kernels.policy_attention import PolicyBatch, PolicyInputs, add_block_mass, policy_attention
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference


@dataclass(kw_only=True)
class PolicySequence:
    """`count` queries at positions from `start`; `dropped` are logical blocks that have left the table."""

    start: int
    count: int = 1
    window: int = 0
    sinks: int = 0
    dropped: tuple[int, ...] = ()


@dataclass
class PolicyCase:
    q: torch.Tensor
    sink_q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PolicyBatch

    def inputs(self, *, scale: float = 0.3, **options: Any) -> PolicyInputs:
        """What implementations are given; `options` may have caches instead of the case's."""
        caches = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        return PolicyInputs(q=self.q, batch=self.batch, scale=scale, **{**caches, **options})


def make_policy_case(sequences: list[PolicySequence], shape: Shape) -> PolicyCase:
    """An ordinary case whose dropped blocks leave the tables and become NaN."""
    paged = make_case([Sequence(start=s.start, count=s.count) for s in sequences], shape)
    kept = [
        [block for block in range(-(-(s.start + s.count) // shape.block_size)) if block not in s.dropped]
        for s in sequences
    ]
    tables = torch.full((len(sequences), max(map(len, kept)) + 1), -1, dtype=torch.int32)
    key_blocks = torch.zeros_like(tables)
    for b, (s, blocks) in enumerate(zip(sequences, kept, strict=True)):
        own = paged.batch.block_table[b].long()
        tables[b, : len(blocks)], key_blocks[b, : len(blocks)] = own[blocks].int(), torch.tensor(blocks)
        for cache in (paged.k_cache, paged.v_cache):
            cache[own[list(s.dropped)]] = float("nan")
    batch = PolicyBatch(
        block_size=shape.block_size,
        block_table=tables,
        key_blocks=key_blocks,
        num_columns=torch.tensor([len(blocks) for blocks in kept], dtype=torch.int32),
        window=torch.tensor([s.window for s in sequences], dtype=torch.int32),
        sinks=torch.tensor([s.sinks for s in sequences], dtype=torch.int32),
        start=paged.batch.start,
        query_offset=paged.batch.query_offset,
        count_host=paged.batch.count_host,
    )
    sink_q = torch.randn(paged.q.shape, generator=torch.Generator().manual_seed(1)).to(shape.dtype)
    return PolicyCase(paged.q, sink_q, paged.k_cache, paged.v_cache, batch)


def check_policy(
    attend: Callable[[PolicyInputs], torch.Tensor],
    add_mass: Callable[[torch.Tensor, PolicyInputs], None],
    case: PolicyCase,
    *,
    kv_format: str = "",
    with_sink_query: bool = False,
    rounding: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and mass of an implementation, compared with the reference's, over caches of `kv_format` if one is given.

    `rounding` is the least difference that is accepted.
    """
    options["sink_q"] = case.sink_q if with_sink_query else None
    if kv_format:
        options |= quantised(case, FORMATS_BY_NAME[kv_format]).arguments
    unwritten = torch.full((*case.q.shape[:2], 2), float("nan"))
    found, expected = (case.inputs(**options, statistics=unwritten.clone()) for _ in range(2))
    out, right = attend(found), policy_attention_reference(expected)
    limit = max(TOLERANCE[case.q.dtype], rounding)
    torch.testing.assert_close(out.float(), right.float(), atol=limit, rtol=limit)
    mass, right_mass = (torch.full(case.batch.block_table.shape, 0.5) for _ in range(2))
    add_mass(mass, found)
    add_block_mass_reference(right_mass, expected)
    rows = (case.batch.query_offset[1:] - case.batch.query_offset[:-1]).clamp(min=1).float()[:, None]
    torch.testing.assert_close(mass / rows, right_mass / rows, atol=2 * limit, rtol=limit)
    if options.get("sink_logits") is None:
        whole = torch.tensor(case.batch.count_host).float() * case.q.shape[1]
        torch.testing.assert_close((mass - 0.5).sum(dim=1), whole, atol=2 * limit * float(rows.max()), rtol=limit)
    return out, mass


ODD = Shape(block_size=16)  # six heads of 24, in groups of three
SHAPE = Shape(heads=4, size=16, block_size=16)  # as in tests of models, which compile the same kernels
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEQUENCES = [
    PolicySequence(start=700, window=300, sinks=20, dropped=tuple(range(2, 25))),  # a window whose run has slid
    PolicySequence(start=700, count=40, window=300, sinks=20, dropped=tuple(range(2, 25))),  # the same for a prompt
    PolicySequence(start=0),
    PolicySequence(start=511, dropped=(1, 4, 5, 9, 30)),  # blocks gone from anywhere
    PolicySequence(start=513, count=3, sinks=40, dropped=(4, 5, 9, 30)),
    PolicySequence(start=90, count=20, window=7, sinks=3),
    PolicySequence(start=50, window=900, sinks=100),
]


def check(case: PolicyCase, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the operators, which choose this device's implementation. Integer products round to 16 bits."""
    return check_policy(policy_attention, add_block_mass, case, rounding=1e-3 if "kv_format" in how else 0.0, **how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_with_gaps_windows_and_sinks(dtype):
    case = make_policy_case(SEQUENCES, replace(ODD if dtype is torch.float16 else SHAPE, dtype=dtype))
    check(case)
    check(case, with_sink_query=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "v_size", "block_size"),
    some_daily([(1, 1, 16, 16, 4), (11, 1, 40, 96, 5), (2, 2, 33, 7, 24)], daily=[(2, 2, 33, 7, 24)]),
)
def test_groups_widths_and_block_sizes(heads, kv_heads, size, v_size, block_size):
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=block_size)
    sequences = [PolicySequence(start=300, window=77, sinks=9, dropped=(3, 4)), PolicySequence(start=99, count=11)]
    sinks = {"sink_logits": torch.tensor([40.0, float("-inf")] * heads)[:heads]}
    for how in (sinks, {"soft_cap": 3.0}, {"soft_cap": 3.0, "sink_logits": torch.linspace(-2, 2, heads)}):
        check(make_policy_case(sequences, shape), with_sink_query=True, **how)


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_daily([(name, dtype) for name in FORMATS_BY_NAME for dtype in DTYPES[:2]], daily=[("int4", torch.bfloat16)]),
)
def test_quantised_caches(name, dtype):
    check(make_policy_case(SEQUENCES, replace(ODD, dtype=dtype)), with_sink_query=True, kv_format=name)


def compact(case: Case, window: int, sinks: int) -> PolicyBatch:
    """An ordinary batch as a compact one."""
    batch, columns = case.batch, case.batch.block_table.shape[1]
    first, logical = batch.first_block[:, None], torch.arange(columns)[None].expand(len(batch.start), -1)
    ahead = logical < batch.num_sink_blocks
    return PolicyBatch(
        block_size=batch.block_size,
        block_table=batch.block_table,
        key_blocks=torch.where(ahead, logical, logical - batch.num_sink_blocks + first).int(),
        num_columns=(batch.block_table >= 0).sum(dim=1).int(),
        window=torch.full_like(batch.start, window),
        sinks=torch.full_like(batch.start, sinks),
        start=batch.start,
        query_offset=batch.query_offset,
        count_host=batch.count_host,
    )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_table_without_gaps_gives_the_bits_of_paged_attention(dtype):
    """So rows without a policy may be computed beside rows with one."""
    starts = (0, 15, 16, 255, 256, 600, 1023)
    decoding = [*(Sequence(start=start, count=1) for start in starts), Sequence(start=700, count=5)]
    prompts = [Sequence(start=0, count=77), Sequence(start=700, count=140)]
    slid = [Sequence(start=900, count=1, first_key=601), Sequence(start=300, count=1, first_key=1)]
    for sequences, num_sink_blocks, window, sinks in ((decoding, 0, 0, 0), (prompts, 0, 0, 0), (slid, 2, 300, 20)):
        case = make_case(sequences, replace(SHAPE, dtype=dtype, num_sink_blocks=num_sink_blocks))
        expected = paged_attention(case.inputs(window=window or None, num_sink_tokens=sinks))
        own = PolicyCase(case.q, case.q, case.k_cache, case.v_cache, compact(case, window, sinks))
        assert torch.equal(policy_attention(own.inputs()), expected)


def attend(case: PolicyCase, batch: PolicyBatch, rows: slice, *, with_sink_query: bool = False) -> torch.Tensor:
    sink_q = case.sink_q[rows] if with_sink_query else None
    return policy_attention(replace(case, q=case.q[rows], batch=batch).inputs(sink_q=sink_q))


@pytest.mark.parametrize("count", [1, 40])
def test_blocks_that_leave_outside_of_the_mask_change_no_bit(count):
    """A step may still have the blocks of the step before; the row's result does not show it."""
    whole = make_policy_case([PolicySequence(start=700, count=count, window=300, sinks=20)], SHAPE)
    columns = [column for column in range(whole.batch.block_table.shape[1] - 1) if column not in range(2, 25)]
    batch = replace(
        whole.batch,
        block_table=whole.batch.block_table[:, columns].contiguous(),
        key_blocks=whole.batch.key_blocks[:, columns].contiguous(),
        num_columns=torch.tensor([len(columns)], dtype=torch.int32),
    )
    assert torch.equal(attend(whole, batch, slice(None)), attend(whole, whole.batch, slice(None)))


@pytest.mark.parametrize("with_sink_query", [False, True])
@pytest.mark.parametrize("sequence", [SEQUENCES[1], PolicySequence(start=0, count=300, window=90, sinks=20)], ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_chunks(sequence, with_sink_query):
    """And alone as beside other sequences; chunks have more than 16 tokens."""
    case = make_policy_case([PolicySequence(start=5, count=30), sequence], SHAPE)
    expected = attend(case, case.batch, slice(None), with_sink_query=with_sink_query)
    begin, end = 30, 30 + sequence.count
    names = ("block_table", "key_blocks", "num_columns", "window", "sinks")
    for first, last in ((begin, begin + 17), (begin + 17, end)):
        batch = replace(
            case.batch,
            **{name: getattr(case.batch, name)[1:].contiguous() for name in names},
            start=torch.tensor([sequence.start + first - begin], dtype=torch.int32),
            query_offset=torch.tensor([0, last - first], dtype=torch.int32),
            count_host=[last - first],
            scratch={},
        )
        out = attend(case, batch, slice(first, last), with_sink_query=with_sink_query)
        assert torch.equal(out, expected[first:last])


def test_a_row_has_the_same_bits_for_any_number_of_threads():
    case = make_policy_case(SEQUENCES, SHAPE)
    expected = check(case, with_sink_query=True)
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            found = check(case, with_sink_query=True)
        assert all(got.equal(wanted) for got, wanted in zip(found, expected, strict=True))


def test_queries_for_sink_tokens_may_have_strides_of_their_own():
    case = make_policy_case(SEQUENCES[:2], SHAPE)
    expected, _ = check(case, with_sink_query=True)
    case.sink_q = torch.cat([case.sink_q, case.sink_q], dim=1)[:, : SHAPE.heads]
    assert torch.equal(check(case, with_sink_query=True)[0], expected)


def test_what_does_not_fit_is_refused():
    case = make_policy_case([PolicySequence(start=9)], SHAPE)
    for q, words in ((torch.zeros(1, 5, 16), "be a multiple"), (torch.zeros(1, 4, 15), "widths must agree")):
        with pytest.raises(ValueError, match=words):
            policy_attention(replace(case, q=q).inputs())
    with pytest.raises(ValueError, match="statistics has shape"):
        policy_attention(case.inputs(statistics=torch.zeros(1, 4)))
    with pytest.raises(ValueError, match="mass is"):
        add_block_mass(torch.zeros(2, 2), case.inputs(statistics=torch.zeros(1, 4, 2)))
    with pytest.raises(ValueError, match="no statistics"):
        add_block_mass(torch.zeros(case.batch.block_table.shape), case.inputs())


def small_case() -> None:
    check(make_policy_case(SEQUENCES[:4], replace(ODD, size=23, dtype=torch.bfloat16)), with_sink_query=True)
