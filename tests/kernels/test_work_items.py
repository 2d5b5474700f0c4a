"""`plan_work` against an equal plan that is written as loops."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.work_items import NO_PARTIAL, Tiling, Work, plan_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What of a batch is looked at."""

    block_size: int
    num_sink_blocks: int
    first_block_host: list[int]
    attend_from_host: list[int]
    start_host: list[int]
    count_host: list[int]


def by_loops(batch: Batch, rule: MaskRule, tiling: Tiling) -> Work:
    items, combine_items, num_partials, row = [], [], 0, 0
    for b, count in enumerate(batch.count_host):
        mine = tiling.min_new_tokens <= count <= tiling.max_new_tokens
        for done in range(0, count if mine else 0, tiling.tile_tokens):
            tokens = min(tiling.tile_tokens, count - done)
            position = batch.start_host[b] + done
            sinks_end, run = slots(batch, rule, b, position, tokens)
            cuts = cut(run, tiling.split_keys) if tiling.split_keys else [run]
            if len(cuts) > 1:
                combine_items.append((row + done, tokens, num_partials, len(cuts)))
            for begin, end in cuts:
                partial = num_partials if len(cuts) > 1 else NO_PARTIAL
                num_partials += len(cuts) > 1
                items.append((row + done, tokens, position, b, 0, sinks_end, begin, end, partial))
                sinks_end = 0  # the first split has them
        row += count
    if not tiling.split_keys:
        items.reverse()  # the longest tiles of prompts begin first
    return Work(
        items=torch.tensor(items, dtype=torch.int32).view(-1, 9),
        combine_items=torch.tensor(combine_items, dtype=torch.int32).view(-1, 4),
        num_partials=num_partials,
    )


def slots(batch: Batch, rule: MaskRule, b: int, position: int, tokens: int) -> tuple[int, tuple[int, int]]:
    size, num_sink_blocks = batch.block_size, batch.num_sink_blocks
    shift = (num_sink_blocks - batch.first_block_host[b]) * size
    end = position + tokens
    sinks_end = min(rule.num_sink_tokens, end)
    low = min(max(sinks_end, rule.first_key(position, batch.attend_from_host[b])), end)
    run_offset = num_sink_blocks * size
    begin_index = low if low < run_offset else max(low + shift, run_offset)
    end_index = end if end <= run_offset else end + shift
    return sinks_end, (begin_index, max(begin_index, end_index))


def cut(run: tuple[int, int], split_keys: int) -> list[tuple[int, int]]:
    begin, end = run
    return list(pairwise([begin, *range((begin // split_keys + 1) * split_keys, end, split_keys), end]))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num = draw(st.integers(0, 5))
    size, num_sink_blocks = draw(st.sampled_from([4, 16])), draw(st.integers(0, 2))

    def numbers(high: int) -> list[int]:
        return draw(st.lists(st.integers(0, high), min_size=num, max_size=num))

    return Batch(
        block_size=size,
        num_sink_blocks=num_sink_blocks,
        first_block_host=[num_sink_blocks + one for one in numbers(6)],
        attend_from_host=numbers(70),
        start_host=numbers(200),
        count_host=numbers(40),
    )


@settings(max_examples=num_examples(daily=80, exhaustive=300), deadline=None)
@given(
    batch=batches(),
    rule=st.builds(
        MaskRule,
        window=st.none() | st.integers(1, 60),
        num_sink_tokens=st.integers(0, 9),
        chunk=st.none() | st.integers(2, 50),
    ),
    tiling=st.builds(
        Tiling,
        min_new_tokens=st.integers(0, 5),
        max_new_tokens=st.integers(1, 40),
        tile_tokens=st.integers(1, 16),
        split_keys=st.sampled_from([0, 16, 48, 64]),
    ),
)
def test_the_same_as_loops(batch: Batch, rule: MaskRule, tiling: Tiling) -> None:
    work, wanted = plan_work(batch, rule, tiling).on(torch.device("cpu")), by_loops(batch, rule, tiling)
    assert torch.equal(work.items, wanted.items)
    assert torch.equal(work.combine_items, wanted.combine_items)
    assert work.num_partials == wanted.num_partials
