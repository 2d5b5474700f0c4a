"""`BlockAllocator`: chooses the blocks that a sequence gets, and evicts cached blocks for them. `Capacity`: computes how much the
KV pool can hold.

    page         a part of the arena; it is leased to one KV cache group at a time
    active       said of a block that a running sequence references
    busy page    a leased page with an active block
    usable page  a page without an active block: not leased, or leased and *idle*; any group may take it, after evictions
    slack        the number of a group's blocks that are in busy pages and not active: the group may take them, after evictions
    run          consecutive free blocks of one page

A group can take its slack and the blocks of usable pages. Every page has the same number of a group's blocks, so simple arithmetic
decides exactly whether an allocation fits: `pages_needed` divides the usable pages among the groups, and `allocate` takes at most
its group's share. Example: a group needs 10 blocks, its slack is 3, and a page has 4 of its blocks. It needs ceil((10 - 3) / 4) = 2
usable pages.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import islice

from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.arena import Arena
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.pool import GroupPool

EVICTED_FOR_OWN_GROUP = "own_group"
EVICTED_FOR_OTHER_GROUP = "other_group"

_SCARCE_FRACTION = 4  # usable pages are scarce when they are at most 1/4 of all pages


class BlockAllocator:
    """Allocates blocks so that a sequence's ids are consecutive where possible, and evicts cached blocks when memory is needed.

    `evict_checkpoint` makes blocks that a checkpoint pins evictable, and returns whether there was such a checkpoint.
    """

    def __init__(self, registry: BlockRegistry, evict_checkpoint: Callable[[], bool]) -> None:
        self._arena, self._pools = registry.arena, registry.pools
        self._evict = registry.evict
        self._evict_checkpoint = evict_checkpoint

    @property
    def usable_pages(self) -> int:
        """Pages without an active block."""
        num_pages = self._arena.num_free
        for pool in self._pools:
            num_pages += len(pool.idle_pages)
        return num_pages

    def has_unpinned(self, group: int) -> bool:
        """Return whether the group can get a block without evicting a checkpoint."""
        pool = self._pools[group]
        return bool(
            pool.num_free or pool.evictable or self._arena.num_free or any(one.evictable_pages for one in self._pools)
        )

    def pages_needed(self, num_blocks: Sequence[int]) -> list[int] | None:
        """Return how many usable pages each group must take to get `num_blocks[group]` more blocks; None if there are too few
        pages."""
        pages = [
            -(-max(0, count - pool.slack) // self._arena.blocks_per_page[group])
            for group, (count, pool) in enumerate(zip(num_blocks, self._pools, strict=True))
        ]
        return pages if sum(pages) <= self.usable_pages else None

    def allocate_all(self, num_blocks: Sequence[int], near: Sequence[int | None]) -> list[list[int]] | None:
        """Take `num_blocks[group]` blocks of each group, right after block `near[group]` if possible, and return them; None if they
        do not fit.

        Each group may take the pages that it needs, and also pages that no group needs, so that block ids stay consecutive.
        """
        pages = self.pages_needed(num_blocks)
        if pages is None:
            return None
        spare = self.usable_pages - sum(pages)
        taken = []
        for group, count in enumerate(num_blocks):
            share = pages[group] + spare
            blocks, used = self.allocate(group, count, near[group], share) if count else ([], 0)
            spare = share - used if count else spare
            taken.append(blocks)
        return taken

    def allocate(self, group: int, count: int, near: int | None, max_pages: int) -> tuple[list[int], int]:
        """Take `count` blocks with one reference each, right after block `near` if possible.

        Return the blocks, and how many usable pages they took: at most `max_pages`, the group's share.
        """
        pool = self._pools[group]
        taken: list[int] = []
        pages = 0
        while len(taken) < count:
            missing = count - len(taken)
            if new_pages := self._new_pages(pool, near, missing, max_pages - pages):
                blocks = pool.take_new_pages(new_pages, missing)
                taken += blocks
                near = taken[-1]
                pages += len(new_pages)
                continue
            first = self._next(pool, near, missing, may_take_page=pages < max_pages)
            # A page without an active block was usable until now.
            pages += not pool.num_active_in[self._arena.page_of(group, first)]
            run = pool.free_run(first, missing)
            pool.take(run)
            taken += run
            near = taken[-1]
        return taken, pages

    def _new_pages(self, pool: GroupPool, near: int | None, count: int, max_pages: int) -> range:
        """Lease consecutive pages for `count` blocks at once, if it is certain that `_next` would lease these pages one by one.

        This only saves time. Return the pages, at most `max_pages`; none if `_next` would or might prefer a free block of another
        page.
        """
        if count <= pool.blocks_per_page:  # `_next` leases a single page as well
            return range(0)
        num_pages = min(max_pages, -(-count // pool.blocks_per_page), self._arena.num_free)
        if pool.slack:  # stop before usable pages become scarce: then slack is preferred
            num_pages = min(num_pages, self.usable_pages - self._arena.num_pages // _SCARCE_FRACTION)
        if num_pages <= 1:
            return range(0)
        if near is None:
            return self._arena.lease_run(pool.group, num_pages)
        page = self._arena.page_of(pool.group, near)
        if pool.first_free(page) is not None:
            return range(0)
        return self._arena.lease_run(pool.group, num_pages, prefer=page + 1)

    def _next(self, pool: GroupPool, near: int | None, count: int, *, may_take_page: bool) -> int:
        """Return a free block; evict cached blocks if there is none. When usable pages are scarce, busy pages are filled first."""
        scarce = self.usable_pages * _SCARCE_FRACTION <= self._arena.num_pages
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
        """Return a free block without evicting any; None if there is none.

        In order of preference: the block after `near`, another block of the same page, a newly leased page (the next one if
        possible), any other leased page.
        """
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
        emptiest = pool.page_with_most_free(busy_only=not may_take_page)
        return None if emptiest is None else pool.first_free(emptiest)

    def _evict_in_busy_page(self, pool: GroupPool, *, must: bool) -> int | None:
        """Evict the evictable blocks of one busy page, and return one of them; None if no busy page has any.

        With `must`, evict checkpoints until a busy page has an evictable block.
        """
        while not (blocks := pool.evictable_in_busy_page()):
            if not must:
                return None
            if not self._evict_checkpoint():
                raise RuntimeError("blocks that were promised are not there")  # a bug: feasibility was checked
            # If the checkpoint's blocks moved to the host tier, they are free already instead of evictable.
            if (block := self._place(pool, None, may_take_page=False)) is not None:
                return block
        self._evict(pool.group, blocks, EVICTED_FOR_OWN_GROUP)
        return blocks[0]

    def _reclaim(self, pool: GroupPool, count: int) -> None:
        """Evict cached blocks so that a block of this group, or a whole page, becomes free.

        In order of preference: up to `count` evictable blocks of the group; as many pages as `count` blocks need, of another group,
        without active or pinned blocks; a checkpoint, whose blocks become evictable.
        """
        if pool.evictable:
            self._evict(pool.group, list(islice(pool.evictable, count)), EVICTED_FOR_OWN_GROUP)
            return
        num_pages = -(-count // pool.blocks_per_page)
        for other in self._pools:
            pages = list(islice(other.evictable_pages, num_pages))
            if pages:
                evictable = [
                    block
                    for page in pages
                    for block in self._arena.blocks(page, other.group)
                    if block in other.evictable
                ]
                self._evict(other.group, evictable, EVICTED_FOR_OTHER_GROUP)
                return
        if not self._evict_checkpoint():
            raise RuntimeError("blocks that were promised are not there")  # a bug: feasibility was checked


class Capacity:
    """Computes the pages that one sequence needs at its peak, the longest sequence that fits, and how many more fit now.

    A sequence's *peak* is the most blocks that it holds at once. Example: two groups with 4 and 8 blocks a page; a sequence that
    holds at most 10 and 9 blocks of them needs ceil(10 / 4) + ceil(9 / 8) = 5 pages. The bounds hold even if blocks are scattered
    over pages, since the cache can compact them.

    `retentions` are those of sequences without a KV policy; for a sequence with a policy, methods take its own.
    """

    def __init__(self, retentions: RetentionSet, arena: Arena, allocator: BlockAllocator) -> None:
        self._retentions = retentions
        self._arena = arena
        self._allocator = allocator

    def worst_case_pages(self, num_tokens: int, retentions: RetentionSet | None = None) -> int:
        """Return the pages that a sequence of `num_tokens` tokens needs at its peak."""
        computed = num_tokens - 1  # the last token is sampled, and no query reads its keys and values
        if computed <= 0:
            return 0
        return sum(
            -(-retention.peak_blocks(computed) // per_page)
            for retention, per_page in zip(retentions or self._retentions, self._arena.blocks_per_page, strict=True)
        )

    def longest_tokens(self, limit: int, retentions: RetentionSet | None = None) -> int:
        """Return the length in tokens, at most `limit`, of the longest sequence that fits the pool alone."""
        lengths = range(1, limit + 1)
        return bisect_right(lengths, self._arena.num_pages, key=lambda n: self.worst_case_pages(n, retentions))

    def num_that_fit(self, num_tokens: int) -> int:
        """Return how many more sequences of `num_tokens` tokens could run now, all at their peak at the same time.

        Cached blocks count as free, since they can be evicted. The sequences are assumed to share no block.
        """
        peaks = [retention.peak_blocks(max(1, num_tokens - 1)) for retention in self._retentions]
        max_blocks = (self._arena.num_pages * per_page for per_page in self._arena.blocks_per_page)
        most = min((count // max(1, peak) for count, peak in zip(max_blocks, peaks, strict=True)), default=0)

        def is_too_many(count: int) -> bool:
            return self._allocator.pages_needed([count * peak for peak in peaks]) is None

        return bisect_left(range(1, most + 1), True, key=is_too_many)
