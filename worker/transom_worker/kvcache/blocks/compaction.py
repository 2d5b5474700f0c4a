"""`Compaction`: clears pages by moving their active blocks into other pages of the same group, when an allocation would otherwise
fail.

A block is *active* while a running sequence references it. A page is *busy* while it has an active block; else it is *usable*: any
group may take it, after evictions. A group's *slack* is the number of its blocks in busy pages that are not active.

Example with pages of 4 blocks (# active, . not active): group A has the pages [#...] [##..], group B needs a page, and none is
usable. Moving the active block of the first page into the second makes the first page usable: [....] [###.].

Clearing a page makes one more page usable, but costs its group slack: the moved blocks fill slack in other pages, and the inactive
blocks of the cleared page no longer count as slack. So a page is chosen only if the allocation lacks fewer pages afterwards; pages
with the fewest active blocks come first. The ranks copy the moved blocks' contents before the next forward pass.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from heapq import nsmallest

from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.pool import GroupPool
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks


class Compaction:
    """Moves active blocks of the `registry` together, and updates the block tables of the `running` sequences (keyed by id()).

    `fixed` yields (group, block) of blocks that must stay where they are.
    """

    def __init__(
        self,
        registry: BlockRegistry,
        running: Mapping[int, SequenceBlocks],
        copies: CopyQueue,
        fixed: Callable[[], Iterable[tuple[int, int]]],
    ) -> None:
        self.num_moved = 0  # blocks, since start
        self._registry = registry
        self._arena, self._pools = registry.arena, registry.pools
        self._running = running
        self._copies = copies
        self._fixed = fixed

    def pages_to_clear(self, num_blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (group, page) pairs to clear so that each group can take `num_blocks[group]` more blocks; empty if no choice does.

        Pages are chosen one by one, until no usable page is missing.
        """
        arena, pools = self._arena, self._pools
        slack = [pool.slack for pool in pools]
        usable = arena.num_free + sum(len(pool.idle_pages) for pool in pools)
        chosen: list[tuple[int, int]] = []

        def missing() -> int:
            """Return how many usable pages the allocation lacks."""
            needs = (max(0, need - have) for need, have in zip(num_blocks, slack, strict=True))
            return (
                sum(-(-need // per_page) for need, per_page in zip(needs, arena.blocks_per_page, strict=True)) - usable
            )

        short = missing()
        # Clearing a page makes one page usable, and costs its group a whole page of slack: the moved blocks and the inactive ones.
        most = [have // per_page for have, per_page in zip(slack, arena.blocks_per_page, strict=True)]
        if sum(most) < short:  # so mostly when memory is full; looking at every page would take longer than a step
            return []
        fixed = {(group, arena.page_of(group, block)) for group, block in self._fixed()}
        emptiest_first = [_emptiest_first(pool, count, fixed) for pool, count in zip(pools, most, strict=True)]
        while short > 0:
            # Of each group's emptiest page, take the one with the fewest blocks to move, if clearing it reduces the shortage.
            best: tuple[int, int, int] | None = None  # (moves, group, page)
            for group, pages in enumerate(emptiest_first):
                if not pages:
                    continue
                page = pages[0]
                moves, size = pools[group].num_active_in[page], len(arena.blocks(page, group))
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
            emptiest_first[group].pop(0)
            slack[group] -= len(arena.blocks(page, group))
            usable += 1
            chosen.append((group, page))
            short = missing()
        return chosen

    def clear(self, pages: Sequence[tuple[int, int]]) -> None:
        """Move the active blocks out of these (group, page) pairs. Their cached blocks must have been evicted before."""
        for group, page in pages:
            cleared = {other for of, other in pages if of == group}
            for block in self._arena.blocks(page, group):
                if self._pools[group].refs[block]:
                    self._move(group, block, cleared)

    def _move(self, group: int, source: int, cleared: set[int]) -> None:
        """Move an active block into the busy page with fewest free blocks that is not one of the `cleared` pages."""
        pool = self._pools[group]
        page = pool.page_with_fewest_free(cleared)
        assert page is not None
        target = pool.first_free(page)
        assert target is not None
        pool.move(source, target)
        self._registry.moved(group, source, target)
        self._copies.add(group, source, target)
        self.num_moved += 1
        for blocks in self._running.values():
            table = blocks.tables[group]
            if table.holds(source):
                table.replace(table.logical_of(source), target)
                blocks.tables_changed = True


def _emptiest_first(pool: GroupPool, count: int, fixed: Container[tuple[int, int]]) -> list[int]:
    """Return `count` busy pages, or all if there are fewer, those with the fewest active blocks first."""
    if not count:
        return []
    busy = [page for page, active in pool.num_active_in.items() if active and (pool.group, page) not in fixed]
    return nsmallest(count, busy, key=pool.num_active_in.__getitem__)
