"""Which block a sequence gets next, and what must go for it.

Feasibility is exact up to pages whose block counts differ by one: blocks come out of a group's own busy pages (its *slack*), or out
of pages that nobody uses (free, or idle in any group). `pages_needed` splits the latter between the groups, and `allocate` keeps
to its share, so an allocation that was promised never fails half-way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.pool import GroupPool, Key

EVICTED_FOR_OWN_GROUP = "own_group"
EVICTED_FOR_OTHER_GROUP = "other_group"

_CANDIDATES = 4  # idle pages per group that are compared before one is emptied
_SCARCE = 4  # usable pages are scarce at a quarter of all
_NEAREST = 64  # oldest blocks that are searched for one in a busy page before a usable page is taken

Evict = Callable[[int, int, str], None]  # (group, block, reason)


class BlockAllocator:
    """Places blocks so that a sequence's ids are consecutive where they can be, and evicts when memory is needed.

    `evict` is called for each block to evict, and must end in `GroupPool.evict`.
    """

    def __init__(self, arena: Arena, pools: list[GroupPool], evict: Evict) -> None:
        self._arena = arena
        self._pools = pools
        self._evict = evict

    @property
    def usable_pages(self) -> int:
        """Pages without an active block."""
        return self._arena.num_free + sum(pool.num_idle_pages for pool in self._pools)

    def pages_needed(self, num_blocks: list[int]) -> list[int] | None:
        """Usable pages that each group must take for so many more blocks; None if there are too few."""
        pages = [
            -(-max(0, count - pool.slack) // self._arena.min_blocks_per_page[group])
            for group, (count, pool) in enumerate(zip(num_blocks, self._pools, strict=True))
        ]
        return pages if sum(pages) <= self.usable_pages else None

    def allocate(self, group: int, count: int, near: int | None, max_pages: int) -> tuple[list[int], int]:
        """`count` blocks with one reference each, at best behind `near`, and the number of usable pages they took."""
        pool = self._pools[group]
        taken: list[int] = []
        pages = 0
        while len(taken) < count:
            block = self._next(pool, near, count - len(taken), may_take_page=pages < max_pages)
            pages += not pool.active_in[self._arena.page_of(group, block)]
            pool.take(block)
            taken.append(block)
            near = block
        return taken, pages

    def _next(self, pool: GroupPool, near: int | None, count: int, *, may_take_page: bool) -> int:
        """An empty block, after evicting if there is none. Where usable pages are scarce, busy ones are filled up first."""
        scarce = self.usable_pages * _SCARCE <= self._arena.num_pages
        if not may_take_page or (scarce and pool.slack):
            block = self._place(pool, near, may_take_page=False)
            if block is None and self._evict_in_busy_pages(pool, count, _NEAREST if may_take_page else None):
                block = self._place(pool, near, may_take_page=False)
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
            if pool.is_empty(near + 1) and self._arena.page_of(pool.group, near + 1) == page:
                return near + 1
            block = pool.first_empty(page)
            if block is not None:
                return block
            prefer = page + 1
        if may_take_page and self._arena.num_free:
            return pool.add_page(self._arena.lease(pool.group, prefer=prefer)).start
        roomiest = pool.roomiest_page(busy_only=not may_take_page)
        return None if roomiest is None else pool.first_empty(roomiest)

    def _evict_in_busy_pages(self, pool: GroupPool, count: int, search: int | None) -> bool:
        """Evict up to `count` of the group's oldest `search` blocks, those in busy pages; whether there was one."""
        oldest = islice(pool.eviction_order(), search)
        busy = [b for b in oldest if pool.active_in[self._arena.page_of(pool.group, b)]][:count]
        for block in busy:
            self._evict(pool.group, block, EVICTED_FOR_OWN_GROUP)
        return bool(busy)

    def _reclaim(self, pool: GroupPool, count: int) -> None:
        """Evict up to `count` of the group's own blocks, or all of the cheapest page of another group."""
        own = next(pool.eviction_order(), None)
        page = self._cheapest_page(pool)
        own_key = None if own is None else pool.key(own)
        if page is not None and (own_key is None or page[0] < own_key):
            self._empty_page(page[1])
            return
        for block in list(islice(pool.eviction_order(), count)):
            self._evict(pool.group, block, EVICTED_FOR_OWN_GROUP)

    def _cheapest_page(self, wanting: GroupPool) -> tuple[Key, int] | None:
        """Of the pages of other groups that fell idle first, the one whose last block goes first."""
        candidates = (
            (pool.page_key(page), page)
            for pool in self._pools
            if pool is not wanting
            for page in islice(pool.idle_pages, _CANDIDATES)
        )
        return min(candidates, default=None)

    def _empty_page(self, page: int) -> None:
        group = self._arena.owner[page]
        for block in self._arena.blocks(page, group):
            if self._pools[group].key(block) is not None:
                self._evict(group, block, EVICTED_FOR_OTHER_GROUP)
