"""The step budget: however tokens are divided, window blocks beyond each sequence's own stay within one bound."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.scheduling.scheduler_driver import BLOCK, layout
from transom_worker.scheduling.step_budget import StepBudget, chunk_limit


@dataclass
class Row:
    """A sequence as far as the budget looks: `scheduled`, and `blocks.processed`."""

    scheduled: int
    blocks: Any

    def extra_blocks(self, window: int, block_size: int) -> int:
        """Blocks of a window group that it holds beyond `ceil(W / block) + 1`."""
        first = max(0, self.blocks.processed - window + 1) // block_size
        return max(0, -(-self.scheduled // block_size) - first - (-(-window // block_size) + 1))


def most_extra_blocks(seed: int, *, steps_in_flight: int, window: int, block_size: int) -> float:
    """Run many sequences for a while; the most extra blocks they held together, as a share of what is allowed."""
    rng = random.Random(seed)
    num_tokens = rng.choice([1, 7, 16, 24, 64])
    starts = [rng.randrange(200) for _ in range(30)]
    rows = [Row(start, SimpleNamespace(processed=start)) for start in starts]
    in_flight: deque[list[tuple[Row, int]]] = deque()
    worst = 0
    for _ in range(40):
        budget = StepBudget(num_tokens, block_size=block_size, max_chunk=num_tokens)
        step = []
        for row in rng.sample(rows, len(rows)):
            wish = rng.choice([1, 3, 3, 3, 5, 40])
            count = min(wish, budget.for_new) if row.scheduled == row.blocks.processed else budget.fit(row, wish)  # type: ignore[arg-type]
            if count:
                budget.take(row, count)  # type: ignore[arg-type]
                row.scheduled += count
                step.append((row, count))
        assert sum(count for _, count in step) <= num_tokens
        assert step or in_flight  # some sequence continues
        in_flight.append(step)
        worst = max(worst, sum(row.extra_blocks(window, block_size) for row in rows))
        if len(in_flight) == steps_in_flight:
            for row, count in in_flight.popleft():
                row.blocks.processed += count
    return worst / (-(-num_tokens // block_size) * steps_in_flight)


@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.integers(1, 40), st.sampled_from([1, 3, 4, 16]))
def test_extra_window_blocks_are_bounded(seed: int, steps_in_flight: int, window: int, block_size: int) -> None:
    share = most_extra_blocks(seed, steps_in_flight=steps_in_flight, window=window, block_size=block_size)
    assert share <= 1


@pytest.mark.parametrize(("bounded", "expected"), [(False, 8), (True, 6)])
def test_tokens_alone_would_not_bound_them(bounded: bool, expected: int) -> None:
    """Eight sequences at the worst place for windows of 8, each with three tokens of a step of 24: one extra block each."""
    budget = StepBudget(24, block_size=4, max_chunk=24 if bounded else None)
    rows = [Row(102, SimpleNamespace(processed=102)) for _ in range(8)]
    for row in rows:
        count = min(3, budget.for_new)
        budget.take(row, count)  # type: ignore[arg-type]
        row.scheduled += count
    assert sum(row.extra_blocks(window=8, block_size=4) for row in rows) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 1024])
def test_one_sequence_may_take_the_whole_step(num_tokens: int) -> None:
    assert StepBudget(num_tokens, block_size=16, max_chunk=num_tokens).for_new == num_tokens


def test_one_chunk_takes_a_bounded_part_of_the_pool() -> None:
    layout_ = layout(["full", "window"], num_pages=200)  # 4,096 bytes a page, 768 a window block
    assert chunk_limit(layout_, BLOCK) == 200 * 4096 // 16 // 768 * BLOCK
    assert chunk_limit(layout(["full"], num_pages=200), BLOCK) is None
    assert chunk_limit(layout(["full", "window"], num_pages=1), BLOCK) == BLOCK
    budget = StepBudget(1000, block_size=BLOCK, max_chunk=40)
    assert budget.for_new == 40
