"""A plan's copies run one after the other over all groups, because a page may pass from one group to another between copies."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_worker.execution.batch.copies import run_copies
from transom_worker.execution.batch.slab import block_rows
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import ArenaLayout, GroupLayout
from transom_worker.scheduling.step import StepPlan

STRIDES = (512, 256, 768)
LAYOUT = ArenaLayout(
    page_bytes=1536,
    num_pages=3,
    groups=tuple(
        GroupLayout(
            spec=GroupSpec(name=str(stride), kind=GroupKind.FULL, layers=(), block_size=4),
            block_bytes=stride,
            stride_bytes=stride,
            layers=(),
        )
        for stride in STRIDES
    ),
)


def copies() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    ids = [st.integers(0, LAYOUT.dump_block(group) - 1) for group in range(len(STRIDES))]
    return st.lists(st.one_of(*(st.tuples(st.just(group), ids[group], ids[group]) for group in range(3))), max_size=12)


@settings(max_examples=100, deadline=None)
@given(copies())
def test_copies_are_as_one_after_the_other_over_all_groups(copies: list[tuple[int, int, int]]) -> None:
    slab = torch.randint(0, 255, (LAYOUT.slab_bytes,), dtype=torch.uint8)
    wanted = slab.clone()
    for group, source, target in copies:
        rows = block_rows(LAYOUT, wanted, group)
        rows[target] = rows[source].clone()
    tiers = [0] * len(copies)
    plan = StepPlan(step_id=0, copy_source_tier=tiers, copy_target_tier=tiers)
    for group, source, target in copies:
        plan.copy_group.append(group)
        plan.copy_source.append(source)
        plan.copy_target.append(target)
    assert run_copies(plan, LAYOUT, slab) == len(copies)
    assert slab.equal(wanted)
