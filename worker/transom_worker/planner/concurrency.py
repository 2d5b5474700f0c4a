"""Computes how many requests of one length fit the KV pool at the same time, without preemption and with an empty prefix cache.

    demand         the blocks, by group, that one request holds at one of its peaks
    lag            tokens of a request that are in flight (their step has not answered yet) when its next token is planned; blocks
                   are freed that many tokens later

The calculation assumes that all requests reach the length at the same time, one token a step. A request holds the most blocks at
the first token of a block, when it has just got one more block. Example with a window of 40 tokens and blocks of 16: at position 64
a request holds blocks 1 to 4, from position 71 on only blocks 2 to 4.

The number of blocks that a sliding group holds repeats with a period; that of a full group only grows. So the peaks are among the
positions of the last period before the length. Groups may peak at different positions there, so a request can have several demands.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.retention import Retention


def num_computed(length: int) -> int:
    """Return how many tokens of a request of `length` tokens get keys and values: all except the last, which is only sampled."""
    return max(1, length - 1)


def peak_demands(retentions: Sequence[Retention], length: int, *, block_size: int, lag: int) -> list[tuple[int, ...]]:
    """Return the demands of one request of `length` tokens. `retentions` says, by group, which tokens the request keeps.

    A demand is left out if another one is at least as large in every group. `block_size` is the worker's `--block-size`, the
    smallest block of all groups.
    """
    period = math.lcm(block_size, *(r.period for r in retentions if not r.keeps_everything))
    last = (num_computed(length) - 1) // block_size
    demands: list[tuple[int, ...]] = []
    for boundary in range(last, max(-1, last - period // block_size), -1):
        held = tuple(retention.allocated_blocks(boundary * block_size, lag=lag) for retention in retentions)
        if not any(_is_at_least(other, held) for other in demands):
            demands.append(held)
    return demands


def max_requests(layout: ArenaLayout, demands: Sequence[Sequence[int]], *, once: Sequence[int]) -> int:
    """Return the largest number of requests whose blocks fit the pages at each of the demands.

    All requests are at the same demand at a time. `once[g]` more blocks of group `g` are needed, however many requests run. Example
    with one group, 4 blocks a page and 10 pages: 3 requests with a demand of 12 blocks fit, because ceil(36 / 4) = 9 pages.
    """
    per_page = [layout.blocks_per_page(group) for group in range(len(layout.groups))]

    def num_pages(count: int) -> int:
        """Return the pages that `count` requests need."""
        return max(
            sum(-(-(count * held + extra) // fits) for held, extra, fits in zip(demand, once, per_page, strict=True))
            for demand in demands
        )

    return bisect_right(range(1, layout.num_pages * max(per_page) + 1), layout.num_pages, key=num_pages)


def in_flight_blocks(retentions: Sequence[Retention], max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the blocks, by group, that a step of `max_num_batched_tokens` prompt tokens takes beyond the demands while in flight.

    A full group has 0: it keeps these blocks anyway, so the demands already count them.
    """
    return tuple(
        0 if retention.keeps_everything else -(-max_num_batched_tokens // retention.block_size)
        for retention in retentions
    )


def _is_at_least(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one demand is at least as large as another in every group."""
    return all(a >= b for a, b in zip(one, other, strict=True))
