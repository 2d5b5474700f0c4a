"""How many requests of a length fit at once: all of them brought to it in lock-step, nothing cached, every page counted.

Most is held where a block more is needed and none has come free since, at a unit's first token. What slides repeats with a period
and what stays only grows, so the last period before the length has the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.retention import Retention


def num_computed(length: int) -> int:
    """Tokens of a request that get keys and values: prompt and answer but for the last token, which nothing follows."""
    return max(1, length - 1)


def peak_demands(layout: ArenaLayout, length: int, *, unit: int, lag: int) -> list[tuple[int, ...]]:
    """Blocks by group that one request of `length` tokens holds at its peaks; no peak is below another in every group."""
    retentions = [Retention(group.spec) for group in layout.groups]
    period = math.lcm(unit, *(r.period for r in retentions if not r.keeps_everything))
    last = (num_computed(length) - 1) // unit
    demands: list[tuple[int, ...]] = []
    for boundary in range(last, max(-1, last - period // unit), -1):
        held = tuple(retention.allocated_blocks(boundary * unit, lag=lag) for retention in retentions)
        if not any(_covers(other, held) for other in demands):
            demands.append(held)
    return demands


def max_requests(layout: ArenaLayout, demands: Sequence[Sequence[int]], *, once: Sequence[int]) -> int:
    """Most requests whose blocks fit the pages at each of their peaks, beside `once` blocks of each group."""
    per_page = [layout.blocks_per_page(group) for group in range(len(layout.groups))]

    def fit(count: int) -> bool:
        return all(
            sum(-(-(count * held + extra) // room) for held, extra, room in zip(demand, once, per_page, strict=True))
            <= layout.num_pages
            for demand in demands
        )

    low, high = 0, layout.num_pages * max(per_page)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low


def in_flight_blocks(layout: ArenaLayout, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Blocks by group that a whole step's tokens take beyond the groups' peaks; what keeps everything has them anyway."""
    return tuple(
        0 if group.spec.keeps_everything else -(-max_num_batched_tokens // group.spec.block_size)
        for group in layout.groups
    )


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
