"""The step budget; `Driver.check_window_blocks` checks after every random operation that window blocks stay within its bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.scheduling.scheduler_driver import BLOCK, layout
from transom_worker.scheduling.step_budget import StepBudget, chunk_limit


@pytest.mark.parametrize(("bounded", "num_extra_blocks"), [(False, 8), (True, 6)])
def test_tokens_alone_would_not_bound_window_blocks(bounded: bool, num_extra_blocks: int) -> None:
    """Eight sequences at the worst place for windows of 8, each with three tokens of a step of 24: one extra block each."""
    budget = StepBudget(24, block_size=4, max_chunk=24 if bounded else None)
    rows: list[Any] = [SimpleNamespace(scheduled=102, blocks=SimpleNamespace(processed=102)) for _ in range(8)]
    for row in rows:
        count = min(3, budget.for_new)
        budget.take(row, count)
        row.scheduled += count
    first_block = (102 - 8 + 1) // 4
    held = [-(-row.scheduled // 4) - first_block for row in rows]
    assert sum(count - (8 // 4 + 1) for count in held) == num_extra_blocks


def test_one_chunk_takes_a_bounded_part_of_the_pool() -> None:
    layout_ = layout(["full", "window"], num_pages=200)  # 4,096 bytes a page, 768 a window block
    assert chunk_limit(layout_, BLOCK) == 200 * 4096 // 16 // 768 * BLOCK
    assert chunk_limit(layout(["full"], num_pages=200), BLOCK) is None
    assert chunk_limit(layout(["full", "window"], num_pages=1), BLOCK) == BLOCK
    assert StepBudget(1000, block_size=BLOCK, max_chunk=40).for_new == 40
