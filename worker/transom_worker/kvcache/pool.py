"""`GroupPool`: the blocks of one KV cache group, their states, and counts of them by page.

A page is a part of the arena that is leased to one group at a time. A block in a leased page is in exactly one state, the first of
these that applies:

    active     a running sequence references it
    pinned     a checkpoint keeps it from being evicted
    evictable  it is published (findable under its digest), and nothing keeps it
    free       it has no content

    from       to          by
    free       active      take: the block is allocated to a sequence
    active     free        unref of the last reference, if the block is not published
    active     pinned      unref of the last reference, if a checkpoint pins the block
    active     evictable   unref of the last reference, if the block is published and not pinned
    pinned     active      ref
    evictable  active      ref
    evictable  pinned      pin
    pinned     evictable   unpin of the last pin
    evictable  free        evict

Pinned and evictable blocks are the prefix cache. A page whose blocks are all free goes back to the arena.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from transom_worker.kvcache.arena import Arena


class GroupPool:
    """States and counts of one group's blocks.

    Lists of blocks mostly have runs of the same page, so methods collect changes of the counts and apply them once per run.
    """

    def __init__(self, arena: Arena, group: int) -> None:
        self.group = group
        self.num_active = 0
        self.num_pinned = 0
        self.num_slots = 0  # blocks in leased pages
        self.num_busy_slots = 0  # blocks in leased pages that have an active block
        self.evictable: OrderedDict[int, None] = OrderedDict()  # in the order of eviction
        self.idle_pages: dict[int, None] = {}  # leased pages without an active block
        self.evictable_pages: dict[
            int, None
        ] = {}  # leased pages without an active or pinned block, in the order of eviction
        self.published: dict[int, tuple[bytes, int]] = {}  # block -> (digest, logical index)
        self.active_in: dict[int, int] = {}  # leased page -> active blocks
        self.refs = [0] * arena.layout.num_block_ids(group)
        self.pins = [0] * len(self.refs)
        self.per_page = arena.blocks_per_page[group]
        self._arena = arena
        self._stride = arena.layout.groups[group].stride_bytes
        self._page_bytes = arena.layout.page_bytes
        self._free = bytearray(len(self.refs))  # 1: free, in a leased page
        self._free_in: dict[int, int] = {}  # leased page -> free blocks
        self.pinned_in: dict[int, int] = {}  # leased page -> pinned blocks
        self.evictable_in: dict[int, int] = {}  # leased page -> evictable blocks
        self.busy_evictable_pages: dict[int, None] = {}  # leased pages with active and evictable blocks
        self._by_num_free: list[dict[int, None]] = [{} for _ in range(self.per_page + 1)]  # leased pages by free blocks

    @property
    def num_cached(self) -> int:
        """Blocks of the prefix cache that no sequence references."""
        return self.num_pinned + len(self.evictable)

    @property
    def num_free(self) -> int:
        """Empty blocks in leased pages."""
        return self.num_slots - self.num_active - self.num_cached

    @property
    def slack(self) -> int:
        """Blocks that are not active in pages with an active block: they can be taken without another page, after evictions."""
        return self.num_busy_slots - self.num_active

    # Pages

    def add_page(self, page: int) -> int:
        """Add a page that the arena has leased to this group; return its first block. All its blocks are free."""
        first, count = self._first_block(page), self.per_page
        self._free[first : first + count] = b"\1" * count
        self.num_slots += count
        self.active_in[page] = self.pinned_in[page] = self.evictable_in[page] = 0
        self.idle_pages[page] = self.evictable_pages[page] = None
        self._free_in[page] = count
        self._by_num_free[count][page] = None
        return first

    def is_free(self, block: int) -> bool:
        """Return whether a block is free; False for blocks of pages that are not leased to this group."""
        return self._free[block] == 1

    def first_free(self, page: int) -> int | None:
        """Return the lowest free block of a leased page; None if it has none."""
        if not self._free_in.get(page):
            return None
        first = self._first_block(page)
        return self._free.find(1, first, first + self.per_page)

    def free_run(self, block: int, limit: int) -> range:
        """Return up to `limit` consecutive free blocks of one page, from a free block on."""
        page = block * self._stride // self._page_bytes
        end = min(self._first_block(page) + self.per_page, block + limit)
        stop = self._free.find(0, block, end)
        return range(block, end if stop < 0 else stop)

    def roomiest_page(self, *, busy_only: bool) -> int | None:
        """Return the leased page with most free blocks, at least one; `busy_only`: among pages with an active block."""
        for pages in reversed(self._by_num_free[1:]):
            for page in pages:
                if not busy_only or self.active_in[page]:
                    return page
        return None

    def fullest_page(self, excluded: Container[int]) -> int | None:
        """Return the page with active blocks and fewest free ones, at least one, that is not in `excluded`."""
        for pages in self._by_num_free[1:]:
            for page in pages:
                if self.active_in[page] and page not in excluded:
                    return page
        return None

    def evictable_in_busy_page(self) -> list[int]:
        """Return the evictable blocks of one page that has active blocks; none if there is no such page."""
        page = next(iter(self.busy_evictable_pages), None)
        if page is None:
            return []
        return [block for block in self._arena.blocks(page, self.group) if block in self.evictable]

    # Blocks

    def take(self, run: range) -> None:
        """Make free blocks of one page active, with one reference each."""
        begin, end = run.start, run.stop
        self._free[begin:end] = bytes(end - begin)
        self.refs[begin:end] = [1] * (end - begin)
        self._shift(begin * self._stride // self._page_bytes, end - begin, 0, 0, begin - end)

    def ref(self, blocks: Iterable[int]) -> list[int]:
        """Add a reference to each block; return the blocks that were cached until now."""
        refs, pins, stride, page_bytes = self.refs, self.pins, self._stride, self._page_bytes
        now_active = []
        page, active, pinned, evictable = -1, 0, 0, 0
        for block in blocks:
            refs[block] += 1
            if refs[block] > 1:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, active, pinned, evictable, 0)
                page, active, pinned, evictable = block * stride // page_bytes, 0, 0, 0
            active += 1
            if pins[block]:
                pinned -= 1
            else:
                del self.evictable[block]
                evictable -= 1
            now_active.append(block)
        self._shift(page, active, pinned, evictable, 0)
        return now_active

    def unref(self, blocks: Iterable[int]) -> list[int]:
        """Remove a reference from each block; return the blocks that are cached from now on. Others without a reference become
        free.
        """
        refs, pins, published, stride, page_bytes = (
            self.refs,
            self.pins,
            self.published,
            self._stride,
            self._page_bytes,
        )
        cached = []
        page, active, pinned, evictable, free = -1, 0, 0, 0, 0
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, active, pinned, evictable, free)
                page, active, pinned, evictable, free = block * stride // page_bytes, 0, 0, 0, 0
            active -= 1
            if pins[block]:
                pinned += 1
                cached.append(block)
            elif block in published:
                self.evictable[block] = None
                evictable += 1
                cached.append(block)
            else:
                self._free[block] = 1
                free += 1
        self._shift(page, active, pinned, evictable, free)
        return cached

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a checkpoint's pin to each of these published blocks."""
        refs, pins, stride, page_bytes = self.refs, self.pins, self._stride, self._page_bytes
        page, moved = -1, 0
        for block in blocks:
            pins[block] += 1
            if pins[block] > 1 or refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, 0, moved, -moved, 0)
                page, moved = block * stride // page_bytes, 0
            del self.evictable[block]
            moved += 1
        self._shift(page, 0, moved, -moved, 0)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Remove a checkpoint's pin from each block. Cached blocks without a pin become evictable, behind those that are."""
        refs, pins, stride, page_bytes = self.refs, self.pins, self._stride, self._page_bytes
        page, moved = -1, 0
        for block in blocks:
            pins[block] -= 1
            if pins[block] or refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, 0, -moved, moved, 0)
                page, moved = block * stride // page_bytes, 0
            self.evictable[block] = None
            moved += 1
        self._shift(page, 0, -moved, moved, 0)

    def evict(self, blocks: Iterable[int]) -> list[tuple[bytes, int]]:
        """Make evictable blocks free; return their digests and logical indices."""
        stride, page_bytes = self._stride, self._page_bytes
        entries = []
        page, moved = -1, 0
        for block in blocks:
            if block * stride // page_bytes != page:
                self._shift(page, 0, 0, -moved, moved)
                page, moved = block * stride // page_bytes, 0
            del self.evictable[block]
            self._free[block] = 1
            entries.append(self.published.pop(block))
            moved += 1
        self._shift(page, 0, 0, -moved, moved)
        return entries

    def move(self, source: int, target: int) -> None:
        """Move an active block's references, pins and digest to a free block; `source` becomes free."""
        self.take(range(target, target + 1))
        self.refs[target], self.refs[source] = self.refs[source], 0
        self.pins[target], self.pins[source] = self.pins[source], 0
        if source in self.published:
            self.published[target] = self.published.pop(source)
        self._free[source] = 1
        self._shift(source * self._stride // self._page_bytes, -1, 0, 0, 1)

    def _first_block(self, page: int) -> int:
        """Return the first block of a page."""
        return -(-page * self._page_bytes // self._stride)

    def _shift(self, page: int, active: int, pinned: int, evictable: int, free: int) -> None:
        """Change a page's number of blocks in each state by so many; page -1: there is no change to apply."""
        if page < 0:
            return
        if free:
            count = self._free_in[page]
            del self._by_num_free[count][page]
            if count + free == self.per_page:
                self._count(page, active, pinned, evictable)
                self._drop_page(page)
                return
            self._free_in[page] = count + free
            self._by_num_free[count + free][page] = None
        self._count(page, active, pinned, evictable)

    def _count(self, page: int, active: int, pinned: int, evictable: int) -> None:
        """Update the counts of a page, and the sets of pages that depend on them."""
        self.num_active += active
        self.num_pinned += pinned
        was_active = self.active_in[page]
        now_active = self.active_in[page] = was_active + active
        now_pinned = self.pinned_in[page] = self.pinned_in[page] + pinned
        now_evictable = self.evictable_in[page] = self.evictable_in[page] + evictable
        if not was_active and now_active:
            del self.idle_pages[page]
            self.num_busy_slots += self.per_page
        elif was_active and not now_active:
            self.idle_pages[page] = None
            self.num_busy_slots -= self.per_page
        if now_active or now_pinned:
            self.evictable_pages.pop(page, None)
        elif page not in self.evictable_pages:
            self.evictable_pages[page] = None
        if now_active and now_evictable:
            self.busy_evictable_pages[page] = None
        else:
            self.busy_evictable_pages.pop(page, None)

    def _drop_page(self, page: int) -> None:
        """Return a page whose blocks are all free to the arena."""
        first = self._first_block(page)
        self._free[first : first + self.per_page] = bytes(self.per_page)
        self.num_slots -= self.per_page
        for counts in (self._free_in, self.active_in, self.pinned_in, self.evictable_in):
            del counts[page]
        del self.idle_pages[page], self.evictable_pages[page]
        self._arena.give_back(page)
