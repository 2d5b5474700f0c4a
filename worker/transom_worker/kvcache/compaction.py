"""The last resort before an allocation fails: pages are cleared by moving their active blocks into others of their group.

A page is worth clearing if the allocation comes closer: the group loses the page's empty blocks as slack, the arena wins a usable
page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.block_registry import BlockRegistry
from transom_worker.kvcache.pool import GroupPool
from transom_worker.kvcache.sequence import SequenceBlocks


class BlockCopy(NamedTuple):
    """Contents of `source` must be in `target` before the next forward pass."""

    group: int
    source: int
    target: int


class Compaction:
    """Moves active blocks together. `running` are the sequences whose tables follow; ranks follow by block copies."""

    def __init__(
        self,
        arena: Arena,
        pools: Sequence[GroupPool],
        registry: BlockRegistry,
        running: Mapping[int, SequenceBlocks],
    ) -> None:
        self.num_moved = 0  # blocks, since start
        self._arena = arena
        self._pools = pools
        self._registry = registry
        self._running = running
        self._copies: list[BlockCopy] = []

    def pages_to_clear(self, num_blocks: Sequence[int]) -> list[tuple[int, int]]:
        """(group, page) pairs whose clearing lets each group take `num_blocks` more; empty if that cannot help."""
        return pages_to_clear(self._arena, self._pools, num_blocks)

    def clear(self, pages: Sequence[tuple[int, int]]) -> None:
        """Move the active blocks out of these pages, in which nothing is cached any more."""
        for group, page in pages:
            leaving = {other for of, other in pages if of == group}
            for block in self._arena.blocks(page, group):
                if self._pools[group].refs[block]:
                    self._move(group, block, leaving)

    def take_copies(self) -> list[BlockCopy]:
        """The moves since the last call, in order: the next plan must carry them."""
        copies, self._copies = self._copies, []
        return copies

    def _move(self, group: int, source: int, leaving: set[int]) -> None:
        pool = self._pools[group]
        page = pool.fullest_page(leaving)
        assert page is not None
        target = pool.first_free(page)
        assert target is not None
        pool.move(source, target)
        self._registry.moved(group, source, target)
        self._copies.append(BlockCopy(group, source, target))
        self.num_moved += 1
        for blocks in self._running.values():
            table = blocks.tables[group]
            if source in table.run or source in table.sink_blocks:
                table.replace(table.logical_of(source), target)
                blocks.changed = True


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
