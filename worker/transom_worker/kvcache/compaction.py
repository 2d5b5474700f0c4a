"""The last resort before an allocation fails: which pages to clear by moving their active blocks into others of their group.

Only counts are looked at here; the cache does the moving. A page is worth clearing if the allocation comes closer: the group loses
the page's empty blocks as slack, the arena wins a usable page.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.pool import GroupPool


def pages_to_clear(arena: Arena, pools: Sequence[GroupPool], num_blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(group, page) pairs that must be cleared so that each group can take `num_blocks` more; empty if that cannot help."""
    slack = [pool.slack for pool in pools]
    usable = arena.num_free + sum(len(pool.idle_pages) for pool in pools)
    busiest_last = [_by_active(pool, slack[group]) for group, pool in enumerate(pools)]
    chosen: list[tuple[int, int]] = []

    def missing() -> int:
        needs = (max(0, need - have) for need, have in zip(num_blocks, slack, strict=True))
        return sum(-(-need // per_page) for need, per_page in zip(needs, arena.blocks_per_page, strict=True)) - usable

    short = missing()
    while short > 0:
        best: tuple[int, int, int] | None = None  # (moves, group, page)
        for group, pages in enumerate(busiest_last):
            if not pages:
                continue
            page = pages[0]
            moves, size = pools[group].active_in[page], len(arena.blocks(page, group))
            slack[group] -= size
            usable += 1
            helps = slack[group] >= 0 and missing() < short
            slack[group] += size
            usable -= 1
            if helps and (best is None or moves < best[0]):
                best = (moves, group, page)
        if best is None:
            return []
        _, group, page = best
        busiest_last[group].pop(0)
        slack[group] -= len(arena.blocks(page, group))
        usable += 1
        chosen.append((group, page))
        short = missing()
    return chosen


def _by_active(pool: GroupPool, slack: int) -> list[int]:
    """Busy pages with few active blocks, the emptiest first: never more than the slack could take in."""
    busy = [page for page, active in pool.active_in.items() if active]
    return nsmallest(min(len(busy), slack), busy, key=pool.active_in.__getitem__)
