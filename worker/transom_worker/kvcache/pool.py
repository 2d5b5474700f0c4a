"""The blocks of one group inside the pages it leases: active (referenced), held (by a checkpoint), loose (findable) or empty."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from transom_worker.kvcache.arena import Arena


class GroupPool:
    """States and counts of one group's blocks; returns a page to the arena once all its blocks are empty.

    A block is in exactly one state, the first that applies: *active* while sequences reference it, *held* while checkpoints count
    on it, *loose* while it is published, else *empty*. Held and loose blocks are the cache; only loose ones are evicted.
    """

    def __init__(self, arena: Arena, group: int) -> None:
        self.group = group
        self.num_active = 0
        self.num_held = 0
        self.num_slots = 0  # block ids in leased pages
        self.num_busy_slots = 0  # block ids in leased pages with an active block
        self.loose: OrderedDict[int, None] = OrderedDict()  # the first to go first
        self.idle_pages: dict[int, None] = {}  # leased, no active block
        self.loose_pages: OrderedDict[int, None] = OrderedDict()  # leased, no active or held block
        self.published: dict[int, tuple[bytes, int]] = {}  # block -> (hash, logical index)
        self.active_in: dict[int, int] = {}  # leased page -> active blocks
        self.refs = [0] * arena.layout.num_block_ids(group)
        self.holds = [0] * len(self.refs)
        self._arena = arena
        self._stride = arena.layout.groups[group].stride_bytes
        self._page_bytes = arena.layout.page_bytes
        self._empty = bytearray(len(self.refs))  # 1: empty, in a leased page
        self._empty_in: dict[int, int] = {}  # leased page -> empty blocks
        self._held_in: dict[int, int] = {}  # leased page -> held blocks
        self._loose_in: dict[int, int] = {}  # leased page -> loose blocks
        self._busy_loose: dict[int, None] = {}  # pages with active and loose blocks
        self._by_empties: list[dict[int, None]] = []  # pages with that many empty blocks

    @property
    def num_cached(self) -> int:
        """Blocks that can be hit and that no sequence references."""
        return self.num_held + len(self.loose)

    @property
    def num_empty(self) -> int:
        """Empty blocks in leased pages."""
        return self.num_slots - self.num_active - self.num_cached

    @property
    def slack(self) -> int:
        """Blocks that could be taken without another page becoming busy (cached ones evicted)."""
        return self.num_busy_slots - self.num_active

    # Pages

    def add_page(self, page: int) -> range:
        """Take over a leased page; all its blocks are empty."""
        ids = self._arena.blocks(page, self.group)
        self._empty[ids.start : ids.stop] = b"\1" * len(ids)
        self.num_slots += len(ids)
        self.active_in[page] = self._held_in[page] = self._loose_in[page] = 0
        self.idle_pages[page] = self.loose_pages[page] = None
        self._empty_in[page] = len(ids)
        self._bucket(len(ids))[page] = None
        return ids

    def is_empty(self, block: int) -> bool:
        """Whether `block` is empty and inside a leased page."""
        return self._empty[block] == 1

    def first_empty(self, page: int) -> int | None:
        """The lowest empty block of a leased page."""
        if not self._empty_in.get(page):
            return None
        ids = self._arena.blocks(page, self.group)
        return self._empty.find(1, ids.start, ids.stop)

    def roomiest_page(self, *, busy_only: bool) -> int | None:
        """A leased page with most empty blocks (at least one)."""
        for pages in reversed(self._by_empties[1:]):
            for page in pages:
                if not busy_only or self.active_in[page]:
                    return page
        return None

    def fullest_page(self, but: Container[int]) -> int | None:
        """A page with active blocks and fewest empty ones (at least one), not in `but`."""
        for pages in self._by_empties[1:]:
            for page in pages:
                if self.active_in[page] and page not in but:
                    return page
        return None

    def loose_in_busy_page(self) -> int | None:
        """A loose block of a page that has active ones."""
        page = next(iter(self._busy_loose), None)
        if page is None:
            return None
        return next(block for block in self._arena.blocks(page, self.group) if block in self.loose)

    # Blocks

    def take(self, block: int) -> None:
        """Empty to active, with one reference."""
        page = block * self._stride // self._page_bytes
        self._empty[block] = 0
        self._count_empty(page, -1)
        self.refs[block] = 1
        self._count_active(page, +1)

    def ref(self, block: int) -> bool:
        """One more reference; whether the block was cached until now."""
        self.refs[block] += 1
        if self.refs[block] > 1:
            return False
        page = block * self._stride // self._page_bytes
        if self.holds[block]:
            self._count_held(page, -1)
        else:
            self._remove_loose(block, page)
        self._count_active(page, +1)
        return True

    def unref(self, block: int) -> bool:
        """One reference less; at none a held or published block is cached (then True), another becomes empty."""
        self.refs[block] -= 1
        if self.refs[block]:
            return False
        page = block * self._stride // self._page_bytes
        self._count_active(page, -1)
        if self.holds[block]:
            self._count_held(page, +1)
        elif block in self.published:
            self._add_loose(block, page)
        else:
            self._make_empty(block, page)
            return False
        return True

    def hold(self, block: int) -> None:
        """A checkpoint counts on a published block."""
        self.holds[block] += 1
        if self.holds[block] == 1 and not self.refs[block]:
            page = block * self._stride // self._page_bytes
            self._remove_loose(block, page)
            self._count_held(page, +1)

    def let_go(self, block: int) -> None:
        """A checkpoint no longer counts on a block; a cached block that nobody holds is the last of the loose ones."""
        self.holds[block] -= 1
        if not self.holds[block] and not self.refs[block]:
            page = block * self._stride // self._page_bytes
            self._count_held(page, -1)
            self._add_loose(block, page)

    def evict(self, block: int) -> tuple[bytes, int]:
        """Loose to empty; returns its hash and logical index."""
        page = block * self._stride // self._page_bytes
        self._remove_loose(block, page)
        entry = self.published.pop(block)
        self._make_empty(block, page)
        return entry

    def move(self, source: int, target: int) -> None:
        """An active block's references, holds and name go to an empty block; `source` becomes empty."""
        self.take(target)
        self.refs[target], self.refs[source] = self.refs[source], 0
        self.holds[target], self.holds[source] = self.holds[source], 0
        if source in self.published:
            self.published[target] = self.published.pop(source)
        page = source * self._stride // self._page_bytes
        self._count_active(page, -1)
        self._make_empty(source, page)

    def _add_loose(self, block: int, page: int) -> None:
        self.loose[block] = None
        self._loose_in[page] += 1
        if self.active_in[page]:
            self._busy_loose[page] = None

    def _remove_loose(self, block: int, page: int) -> None:
        del self.loose[block]
        self._loose_in[page] -= 1
        if not self._loose_in[page]:
            self._busy_loose.pop(page, None)

    def _make_empty(self, block: int, page: int) -> None:
        self._empty[block] = 1
        self._count_empty(page, +1)
        ids = self._arena.blocks(page, self.group)
        if self._empty_in[page] == len(ids):
            self._drop_page(page, ids)

    def _drop_page(self, page: int, ids: range) -> None:
        self._empty[ids.start : ids.stop] = bytes(len(ids))
        self.num_slots -= len(ids)
        del self._by_empties[self._empty_in.pop(page)][page], self.active_in[page], self.idle_pages[page]
        del self.loose_pages[page], self._held_in[page], self._loose_in[page]
        self._arena.give_back(page)

    def _count_empty(self, page: int, change: int) -> None:
        count = self._empty_in[page]
        del self._by_empties[count][page]
        self._empty_in[page] = count + change
        self._bucket(count + change)[page] = None

    def _bucket(self, count: int) -> dict[int, None]:
        while len(self._by_empties) <= count:
            self._by_empties.append({})
        return self._by_empties[count]

    def _count_active(self, page: int, change: int) -> None:
        self.num_active += change
        before = self.active_in[page]
        self.active_in[page] = before + change
        if before == 0:
            del self.idle_pages[page]
            self.loose_pages.pop(page, None)
            self.num_busy_slots += len(self._arena.blocks(page, self.group))
            if self._loose_in[page]:
                self._busy_loose[page] = None
        elif before + change == 0:
            self.idle_pages[page] = None
            if not self._held_in[page]:
                self.loose_pages[page] = None
            self.num_busy_slots -= len(self._arena.blocks(page, self.group))
            self._busy_loose.pop(page, None)

    def _count_held(self, page: int, change: int) -> None:
        self.num_held += change
        self._held_in[page] += change
        if self._held_in[page]:
            self.loose_pages.pop(page, None)
        elif not self.active_in[page]:
            self.loose_pages[page] = None
