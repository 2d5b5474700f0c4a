"""`GroupPool`: the blocks of one KV cache group, the state of each block, and counts of blocks by state and page.

The arena's pages are leased to one group at a time. A leased page with an active block is *busy*, and one without is *idle*. A
group's *slack* is the number of inactive blocks in its busy pages: the group can take these without another page, after evictions.

A block in a leased page is in exactly one state, the first of these that applies:

    active     a running sequence references it
    pinned     a checkpoint pins it
    evictable  it is published, and nothing references or pins it
    free       it has no content

How a block changes its state, by the method that does it:

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

Block `b` lies at byte `b * stride`, so it belongs to page `b * stride // page_bytes`. Example with a stride of 256 bytes and pages
of 1,024 bytes: page 2 has blocks 8 to 11.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from transom_worker.kvcache.blocks.arena import Arena


class GroupPool:
    """States and counts of one group's blocks.

    Neighbours in a list of blocks are mostly in the same page. So methods collect the changes of a page's counts while consecutive
    blocks are in that page, and apply them when the page changes. Example: `unref` of blocks 8, 9, 10 and 40 changes the counts of
    two pages, once each.
    """

    def __init__(self, arena: Arena, group: int) -> None:
        self.group = group
        self.num_active = 0
        self.num_pinned = 0
        self.num_leased_blocks = 0  # blocks in leased pages
        self.num_blocks_in_busy_pages = 0
        self.evictable: OrderedDict[int, None] = OrderedDict()  # in the order of eviction
        self.idle_pages: dict[int, None] = {}  # leased pages without an active block
        # Leased pages without an active or pinned block, in the order of eviction.
        self.evictable_pages: dict[int, None] = {}
        self.published: dict[int, tuple[bytes, int]] = {}  # block -> (digest, logical index)
        self.num_active_in: dict[int, int] = {}  # leased page -> active blocks
        self.refs = [0] * arena.layout.num_block_ids(group)
        self.pins = [0] * len(self.refs)
        self.blocks_per_page = arena.blocks_per_page[group]
        self._arena = arena
        self._stride = arena.layout.groups[group].stride_bytes
        self._page_bytes = arena.layout.page_bytes
        self._free_flags = bytearray(len(self.refs))  # by block; 1: free, in a leased page
        self._num_free_in: dict[int, int] = {}  # leased page -> free blocks
        self.num_pinned_in: dict[int, int] = {}  # leased page -> pinned blocks
        self.num_evictable_in: dict[int, int] = {}  # leased page -> evictable blocks
        self.busy_evictable_pages: dict[int, None] = {}  # leased pages with active and evictable blocks
        # Leased pages by their number of free blocks.
        self._pages_by_num_free: list[dict[int, None]] = [{} for _ in range(self.blocks_per_page + 1)]

    @property
    def num_cached(self) -> int:
        """Blocks of the prefix cache that no sequence references."""
        return self.num_pinned + len(self.evictable)

    @property
    def num_free(self) -> int:
        """Free blocks in leased pages."""
        return self.num_leased_blocks - self.num_active - self.num_cached

    @property
    def slack(self) -> int:
        """Blocks of busy pages that are not active: the group can take them without another page, after evictions."""
        return self.num_blocks_in_busy_pages - self.num_active

    # Pages

    def add_page(self, page: int) -> int:
        """Add a page that the arena has leased to this group; return its first block. All its blocks are free."""
        first, count = self._first_block(page), self.blocks_per_page
        self._free_flags[first : first + count] = b"\1" * count
        self.num_leased_blocks += count
        self.num_active_in[page] = self.num_pinned_in[page] = self.num_evictable_in[page] = 0
        self.idle_pages[page] = self.evictable_pages[page] = None
        self._num_free_in[page] = count
        self._pages_by_num_free[count][page] = None
        return first

    def take_new_pages(self, pages: range, count: int) -> list[int]:
        """Add consecutive pages that the arena has just leased to this group, and make their first `count` blocks active, with one
        reference each; return these blocks. The pages before the last one are filled."""
        per_page = self.blocks_per_page
        count = min(count, len(pages) * per_page)
        num_full = count // per_page
        self.num_leased_blocks += num_full * per_page
        self.num_blocks_in_busy_pages += num_full * per_page
        self.num_active += num_full * per_page
        without_free = self._pages_by_num_free[0]
        blocks: list[int] = []
        for page in pages[:num_full]:  # mostly one or two
            self.num_active_in[page] = per_page
            self.num_pinned_in[page] = self.num_evictable_in[page] = self._num_free_in[page] = 0
            without_free[page] = None
            first = -(-page * self._page_bytes // self._stride)
            self.refs[first : first + per_page] = [1] * per_page
            blocks += range(first, first + per_page)
        if num_full < len(pages):
            run = self.free_run(self.add_page(pages[num_full]), count - num_full * per_page)
            self.take(run)
            blocks += run
        return blocks

    def is_free(self, block: int) -> bool:
        """Return whether a block is free; False if its page is not leased to this group."""
        return self._free_flags[block] == 1

    def first_free(self, page: int) -> int | None:
        """Return the lowest free block of a leased page; None if it has none."""
        if not self._num_free_in.get(page):
            return None
        first = self._first_block(page)
        return self._free_flags.find(1, first, first + self.blocks_per_page)

    def free_run(self, block: int, limit: int) -> range:
        """Return `block`, which must be free, and the free blocks right after it in its page: `limit` blocks at most."""
        page = block * self._stride // self._page_bytes
        end = min(self._first_block(page) + self.blocks_per_page, block + limit)
        stop = self._free_flags.find(0, block, end)
        return range(block, end if stop < 0 else stop)

    def page_with_most_free(self, *, busy_only: bool) -> int | None:
        """Return the leased page with the most free blocks; None if no page has a free block. With `busy_only` only busy pages
        count."""
        for pages in reversed(self._pages_by_num_free[1:]):
            for page in pages:
                if not busy_only or self.num_active_in[page]:
                    return page
        return None

    def page_with_fewest_free(self, excluded: Container[int]) -> int | None:
        """Return the busy page outside `excluded` with the fewest free blocks, but at least one; None if there is none."""
        for pages in self._pages_by_num_free[1:]:
            for page in pages:
                if self.num_active_in[page] and page not in excluded:
                    return page
        return None

    def evictable_in_busy_page(self) -> list[int]:
        """Return the evictable blocks of one busy page; an empty list if no busy page has any."""
        page = next(iter(self.busy_evictable_pages), None)
        if page is None:
            return []
        return [block for block in self._arena.blocks(page, self.group) if block in self.evictable]

    # Blocks

    def take(self, run: range) -> None:
        """Make free blocks of one page active, with one reference each."""
        begin, end = run.start, run.stop
        self._free_flags[begin:end] = bytes(end - begin)
        self.refs[begin:end] = [1] * (end - begin)
        self._add_to_page_counts(begin * self._stride // self._page_bytes, end - begin, 0, 0, begin - end)

    def ref(self, blocks: Iterable[int]) -> list[int]:
        """Add a reference to each block, which must be active or cached; return the blocks that were cached until now."""
        refs, pins, stride, page_bytes = self.refs, self.pins, self._stride, self._page_bytes
        now_active = []
        page: int | None = None  # the page that the collected changes are for
        active = pinned = evictable = 0
        for block in blocks:
            refs[block] += 1
            if refs[block] > 1:
                continue
            if block * stride // page_bytes != page:
                self._add_to_page_counts(page, active, pinned, evictable, 0)
                page, active, pinned, evictable = block * stride // page_bytes, 0, 0, 0
            active += 1
            if pins[block]:
                pinned -= 1
            else:
                del self.evictable[block]
                evictable -= 1
            now_active.append(block)
        self._add_to_page_counts(page, active, pinned, evictable, 0)
        return now_active

    def unref(self, blocks: Iterable[int]) -> list[int]:
        """Remove a reference from each block; return the blocks that are cached from now on.

        A block without a reference, a pin and a digest becomes free.
        """
        refs, pins, published = self.refs, self.pins, self.published
        stride, page_bytes = self._stride, self._page_bytes
        cached = []
        page: int | None = None  # the page that the collected changes are for
        active = pinned = evictable = free = 0
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._add_to_page_counts(page, active, pinned, evictable, free)
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
                self._free_flags[block] = 1
                free += 1
        self._add_to_page_counts(page, active, pinned, evictable, free)
        return cached

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a checkpoint's pin to each of these published blocks."""
        refs, pins, stride, page_bytes = self.refs, self.pins, self._stride, self._page_bytes
        page: int | None = None  # the page that the collected changes are for
        moved = 0  # from evictable to pinned
        for block in blocks:
            pins[block] += 1
            if pins[block] > 1 or refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._add_to_page_counts(page, 0, moved, -moved, 0)
                page, moved = block * stride // page_bytes, 0
            del self.evictable[block]
            moved += 1
        self._add_to_page_counts(page, 0, moved, -moved, 0)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Remove a checkpoint's pin from each block. Cached blocks without a pin become evictable, and come last in the order of
        eviction."""
        refs, pins, stride, page_bytes = self.refs, self.pins, self._stride, self._page_bytes
        page: int | None = None  # the page that the collected changes are for
        moved = 0  # from pinned to evictable
        for block in blocks:
            pins[block] -= 1
            if pins[block] or refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._add_to_page_counts(page, 0, -moved, moved, 0)
                page, moved = block * stride // page_bytes, 0
            self.evictable[block] = None
            moved += 1
        self._add_to_page_counts(page, 0, -moved, moved, 0)

    def evict(self, blocks: Iterable[int]) -> list[tuple[bytes, int]]:
        """Make evictable blocks free; return (digest, logical index) of each. Pages whose blocks are all free go back to the
        arena."""
        stride, page_bytes, published, evictable = self._stride, self._page_bytes, self.published, self.evictable
        entries = []
        num_by_page: dict[int, int] = {}
        for block in blocks:
            page = block * stride // page_bytes
            num_by_page[page] = num_by_page.get(page, 0) + 1
            del evictable[block]
            self._free_flags[block] = 1
            entries.append(published.pop(block))
        empty = []
        for page, count in num_by_page.items():
            if self._num_free_in[page] + count == self.blocks_per_page:
                del self._pages_by_num_free[self._num_free_in[page]][page]
                empty.append(page)
            else:
                self._add_to_page_counts(page, 0, 0, -count, count)
        self._return_pages(empty)
        return entries

    def move(self, source: int, target: int) -> None:
        """Move the references, pins and digest of the active block `source` to the free block `target`; `source` becomes free."""
        self.take(range(target, target + 1))
        self.refs[target], self.refs[source] = self.refs[source], 0
        self.pins[target], self.pins[source] = self.pins[source], 0
        if source in self.published:
            self.published[target] = self.published.pop(source)
        self._free_flags[source] = 1
        self._add_to_page_counts(source * self._stride // self._page_bytes, -1, 0, 0, 1)

    def _first_block(self, page: int) -> int:
        """Return the first block of a page."""
        return -(-page * self._page_bytes // self._stride)

    def _add_to_page_counts(self, page: int | None, active: int, pinned: int, evictable: int, free: int) -> None:
        """Add these changes to a page's number of blocks in each state; give the page back to the arena if all its blocks are free.

        None for `page` means that no change was collected yet.
        """
        if page is None:
            return
        if free:
            num_free = self._num_free_in[page]
            del self._pages_by_num_free[num_free][page]
            if num_free + free == self.blocks_per_page:
                self._add_to_state_counts(page, active, pinned, evictable)
                self._return_pages((page,))
                return
            self._num_free_in[page] = num_free + free
            self._pages_by_num_free[num_free + free][page] = None
        self._add_to_state_counts(page, active, pinned, evictable)

    def _add_to_state_counts(self, page: int, active: int, pinned: int, evictable: int) -> None:
        """Add changes to the counts of active, pinned and evictable blocks, and update the sets of pages that depend on them."""
        self.num_active += active
        self.num_pinned += pinned
        was_active = self.num_active_in[page]
        now_active = self.num_active_in[page] = was_active + active
        now_pinned = self.num_pinned_in[page] = self.num_pinned_in[page] + pinned
        now_evictable = self.num_evictable_in[page] = self.num_evictable_in[page] + evictable
        if not was_active and now_active:
            del self.idle_pages[page]
            self.num_blocks_in_busy_pages += self.blocks_per_page
        elif was_active and not now_active:
            self.idle_pages[page] = None
            self.num_blocks_in_busy_pages -= self.blocks_per_page
        if now_active or now_pinned:
            self.evictable_pages.pop(page, None)
        elif page not in self.evictable_pages:
            self.evictable_pages[page] = None
        if now_active and now_evictable:
            self.busy_evictable_pages[page] = None
        else:
            self.busy_evictable_pages.pop(page, None)

    def _return_pages(self, pages: Sequence[int]) -> None:
        """Give pages whose blocks are all free back to the arena."""
        per_page = self.blocks_per_page
        self.num_leased_blocks -= per_page * len(pages)
        for page in pages:
            first = self._first_block(page)
            self._free_flags[first : first + per_page] = bytes(per_page)
            del self._num_free_in[page], self.num_active_in[page], self.num_pinned_in[page], self.num_evictable_in[page]
            del self.idle_pages[page], self.evictable_pages[page]
        self._arena.give_back(pages)
