"""Which block a sequence gets next, and what must go for it.

Feasibility is exact: blocks come out of a group's own busy pages (its *slack*), or out of pages that nobody uses (free, or idle in
any group), and every page has as many. `pages_needed` splits the latter between the groups, and `allocate` keeps to its share, so
an allocation that was promised never fails half-way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.pool import GroupPool

EVICTED_FOR_OWN_GROUP = "own_group"
EVICTED_FOR_OTHER_GROUP = "other_group"

_SCARCE = 4  # usable pages are scarce at a quarter of all

Evict = Callable[[int, list[int], str], None]  # (group, evictable blocks, reason)
EvictCheckpoint = Callable[[], bool]


class BlockAllocator:
    """Places blocks so that a sequence's ids are consecutive where they can be, and evicts when memory is needed.

    `evict` must end in `GroupPool.evict`; `evict_checkpoint` makes held blocks evictable, and tells whether there were any.
    """

    def __init__(self, arena: Arena, pools: list[GroupPool], evict: Evict, evict_checkpoint: EvictCheckpoint) -> None:
        self._arena = arena
        self._pools = pools
        self._evict = evict
        self._evict_checkpoint = evict_checkpoint

    @property
    def usable_pages(self) -> int:
        """Pages without an active block."""
        return self._arena.num_free + sum(len(pool.idle_pages) for pool in self._pools)

    def pages_needed(self, num_blocks: list[int]) -> list[int] | None:
        """Usable pages that each group must take for so many more blocks; None if there are too few."""
        pages = [
            -(-max(0, count - pool.slack) // self._arena.blocks_per_page[group])
            for group, (count, pool) in enumerate(zip(num_blocks, self._pools, strict=True))
        ]
        return pages if sum(pages) <= self.usable_pages else None

    def allocate(self, group: int, count: int, near: int | None, max_pages: int) -> tuple[list[int], int]:
        """`count` blocks with one reference each, at best behind `near`, and the number of usable pages they took."""
        pool = self._pools[group]
        taken: list[int] = []
        pages = 0
        while len(taken) < count:
            missing = count - len(taken)
            first = self._next(pool, near, missing, may_take_page=pages < max_pages)
            pages += not pool.active_in[self._arena.page_of(group, first)]
            run = pool.free_run(first, missing)
            pool.take(run)
            taken += run
            near = taken[-1]
        return taken, pages

    def _next(self, pool: GroupPool, near: int | None, count: int, *, may_take_page: bool) -> int:
        """An empty block, after evicting if there is none. Where usable pages are scarce, busy ones are filled up first."""
        scarce = self.usable_pages * _SCARCE <= self._arena.num_pages
        if not may_take_page or (scarce and pool.slack):
            block = self._place(pool, near, may_take_page=False)
            if block is None:
                block = self._evict_in_busy_page(pool, must=not may_take_page)
            if block is not None:
                return block
        while (block := self._place(pool, near, may_take_page=True)) is None:
            self._reclaim(pool, count)
        return block

    def _place(self, pool: GroupPool, near: int | None, *, may_take_page: bool) -> int | None:
        """An empty block: next to `near`, in its page, in a fresh page (the next at best), in any page; else None."""
        prefer = None
        if near is not None:
            page = self._arena.page_of(pool.group, near)
            if pool.is_free(near + 1) and self._arena.page_of(pool.group, near + 1) == page:
                return near + 1
            block = pool.first_free(page)
            if block is not None:
                return block
            prefer = page + 1
        if may_take_page and self._arena.num_free:
            return pool.add_page(self._arena.lease(pool.group, prefer=prefer))
        roomiest = pool.roomiest_page(busy_only=not may_take_page)
        return None if roomiest is None else pool.first_free(roomiest)

    def _evict_in_busy_page(self, pool: GroupPool, *, must: bool) -> int | None:
        """Empty the evictable blocks of a busy page of the group; if it `must`, let checkpoints go until there are some."""
        while not (blocks := pool.evictable_in_busy_page()):
            if not must:
                return None
            if not self._evict_checkpoint():
                raise RuntimeError("blocks that were promised are not there")  # a bug: feasibility was checked
        self._evict(pool.group, blocks, EVICTED_FOR_OWN_GROUP)
        return blocks[0]

    def _reclaim(self, pool: GroupPool, count: int) -> None:
        """Evict up to `count` evictable blocks of the group, else all of a evictable page of another; else let a checkpoint go."""
        if pool.evictable:
            self._evict(pool.group, list(islice(pool.evictable, count)), EVICTED_FOR_OWN_GROUP)
            return
        for other in self._pools:
            page = next(iter(other.evictable_pages), None)
            if page is not None:
                evictable = [block for block in self._arena.blocks(page, other.group) if block in other.evictable]
                self._evict(other.group, evictable, EVICTED_FOR_OTHER_GROUP)
                return
        if not self._evict_checkpoint():
            raise RuntimeError("blocks that were promised are not there")  # a bug: feasibility was checked
