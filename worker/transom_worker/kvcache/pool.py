"""The blocks of one group inside the pages it leases: active (referenced), cached (findable, unreferenced) or empty."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from transom_worker.kvcache.arena import Arena

LEFT_BEHIND = 0  # slid out of a window while its sequence ran
KEPT = 1

Key = tuple[int, int]  # (class, tick): smaller is evicted first


class GroupPool:
    """States and reference counts of one group's blocks; returns a page to the arena once all its blocks are empty.

    A block is in exactly one place: referenced, in one of the two eviction queues, or empty. A published block has an entry in
    `published` whether active or cached.
    """

    def __init__(self, arena: Arena, group: int) -> None:
        self.group = group
        self.num_active = 0
        self.num_slots = 0  # block ids in leased pages
        self.idle_pages: OrderedDict[int, None] = OrderedDict()  # leased, no active block; idle for longest first
        self.num_busy_slots = 0  # block ids in leased pages with an active block
        self.published: dict[int, tuple[bytes, int]] = {}  # block -> (hash, logical index)
        self.active_in: dict[int, int] = {}  # leased page -> active blocks
        self.refs = [0] * arena.layout.num_block_ids(group)
        self._arena = arena
        self._empty = bytearray(len(self.refs))  # 1: empty, in a leased page
        self._empty_in: dict[int, int] = {}  # leased page -> empty blocks
        self._by_empties: list[dict[int, None]] = []  # pages with that many empty blocks
        self._queues: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())  # class: block -> tick

    @property
    def num_cached(self) -> int:
        """Blocks that can be hit or evicted."""
        return len(self._queues[LEFT_BEHIND]) + len(self._queues[KEPT])

    @property
    def num_empty(self) -> int:
        """Empty blocks in leased pages."""
        return self.num_slots - self.num_active - self.num_cached

    @property
    def num_idle_pages(self) -> int:
        """Leased pages without an active block."""
        return len(self.idle_pages)

    @property
    def slack(self) -> int:
        """Blocks that could be taken without another page becoming busy (cached ones evicted)."""
        return self.num_busy_slots - self.num_active

    def add_page(self, page: int) -> range:
        """Take over a leased page; all its blocks are empty."""
        ids = self._arena.blocks(page, self.group)
        self._empty[ids.start : ids.stop] = b"\1" * len(ids)
        self.num_slots += len(ids)
        self.active_in[page] = 0
        self.idle_pages[page] = None
        self._empty_in[page] = len(ids)
        self._bucket(len(ids))[page] = None
        return ids

    def take(self, block: int) -> None:
        """Empty to active, with one reference."""
        self._empty[block] = 0
        page = self._arena.page_of(self.group, block)
        self._count_empty(page, -1)
        self.refs[block] = 1
        self._count_active(page, +1)

    def ref(self, block: int) -> None:
        """One more reference; a cached block becomes active."""
        self.refs[block] += 1
        if self.refs[block] == 1:
            for queue in self._queues:
                queue.pop(block, None)
            self._count_active(self._arena.page_of(self.group, block), +1)

    def unref(self, block: int, *, tick: int, rank: int = KEPT) -> None:
        """One reference less; at none, a published block is cached in class `rank`, another becomes empty."""
        self.refs[block] -= 1
        if self.refs[block]:
            return
        page = self._arena.page_of(self.group, block)
        self._count_active(page, -1)
        if block in self.published:
            self._queues[rank][block] = tick
        else:
            self._make_empty(block, page)

    def evict(self, block: int) -> tuple[bytes, int]:
        """Cached to empty; returns its hash and logical index."""
        for queue in self._queues:
            queue.pop(block, None)
        entry = self.published.pop(block)
        self._make_empty(block, self._arena.page_of(self.group, block))
        return entry

    def eviction_order(self) -> Iterator[int]:
        """Cached blocks, the first to go first. Do not change the pool while iterating."""
        return chain(self._queues[LEFT_BEHIND], self._queues[KEPT])

    def key(self, block: int) -> Key | None:
        """A cached block's place in the order, comparable between groups; None if not cached."""
        for rank, queue in enumerate(self._queues):
            tick = queue.get(block)
            if tick is not None:
                return rank, tick
        return None

    def page_key(self, page: int) -> Key:
        """The place of the last of a page's cached blocks."""
        keys = (self.key(block) for block in self._arena.blocks(page, self.group))
        return max((key for key in keys if key is not None), default=(LEFT_BEHIND, -1))

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
            self.num_busy_slots += len(self._arena.blocks(page, self.group))
        elif before + change == 0:
            self.idle_pages[page] = None
            self.num_busy_slots -= len(self._arena.blocks(page, self.group))
