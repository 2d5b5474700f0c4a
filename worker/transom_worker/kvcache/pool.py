"""The blocks of one group inside the pages it leases: active (referenced), held (by a checkpoint), loose (findable) or empty."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from transom_worker.kvcache.arena import Arena


class GroupPool:
    """States and counts of one group's blocks; returns a page to the arena once all its blocks are empty.

    A block is in exactly one state, the first that applies: *active* while sequences reference it, *held* while checkpoints count
    on it, *loose* while it is published, else *empty*. Held and loose blocks are the cache; only loose ones are evicted. Blocks
    come in runs of the same page, so counts are kept by page and moved once a run.
    """

    def __init__(self, arena: Arena, group: int) -> None:
        self.group = group
        self.num_active = 0
        self.num_held = 0
        self.num_slots = 0  # block ids in leased pages
        self.num_busy_slots = 0  # block ids in leased pages with an active block
        self.loose: OrderedDict[int, None] = OrderedDict()  # the first to go first
        self.idle_pages: dict[int, None] = {}  # leased, no active block
        self.loose_pages: dict[int, None] = {}  # leased, no active or held block; the first to go first
        self.published: dict[int, tuple[bytes, int]] = {}  # block -> (hash, logical index)
        self.active_in: dict[int, int] = {}  # leased page -> active blocks
        self.refs = [0] * arena.layout.num_block_ids(group)
        self.holds = [0] * len(self.refs)
        self.per_page = arena.blocks_per_page[group]
        self._arena = arena
        self._stride = arena.layout.groups[group].stride_bytes
        self._page_bytes = arena.layout.page_bytes
        self._empty = bytearray(len(self.refs))  # 1: empty, in a leased page
        self._empty_in: dict[int, int] = {}  # leased page -> empty blocks
        self._held_in: dict[int, int] = {}  # leased page -> held blocks
        self._loose_in: dict[int, int] = {}  # leased page -> loose blocks
        self._busy_loose: dict[int, None] = {}  # pages with active and loose blocks
        self._by_empties: list[dict[int, None]] = [{} for _ in range(self.per_page + 1)]  # pages by empty blocks

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

    def add_page(self, page: int) -> int:
        """Take over a leased page, whose blocks are all empty; returns the first."""
        first, count = self._first_block(page), self.per_page
        self._empty[first : first + count] = b"\1" * count
        self.num_slots += count
        self.active_in[page] = self._held_in[page] = self._loose_in[page] = 0
        self.idle_pages[page] = self.loose_pages[page] = None
        self._empty_in[page] = count
        self._by_empties[count][page] = None
        return first

    def is_empty(self, block: int) -> bool:
        """Whether `block` is empty and inside a leased page."""
        return self._empty[block] == 1

    def first_empty(self, page: int) -> int | None:
        """The lowest empty block of a leased page."""
        if not self._empty_in.get(page):
            return None
        first = self._first_block(page)
        return self._empty.find(1, first, first + self.per_page)

    def empty_run(self, block: int, limit: int) -> range:
        """Up to `limit` consecutive empty blocks of one page, from an empty one on."""
        page = block * self._stride // self._page_bytes
        end = min(self._first_block(page) + self.per_page, block + limit)
        stop = self._empty.find(0, block, end)
        return range(block, end if stop < 0 else stop)

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

    def loose_in_busy_page(self) -> list[int]:
        """The loose blocks of a page that has active ones; none if there is no such page."""
        page = next(iter(self._busy_loose), None)
        if page is None:
            return []
        return [block for block in self._arena.blocks(page, self.group) if block in self.loose]

    # Blocks

    def take(self, run: range) -> None:
        """Empty to active, with one reference each; all in one page."""
        begin, end = run.start, run.stop
        self._empty[begin:end] = bytes(end - begin)
        self.refs[begin:end] = [1] * (end - begin)
        self._shift(begin * self._stride // self._page_bytes, end - begin, 0, 0, begin - end)

    def ref(self, blocks: Iterable[int]) -> list[int]:
        """One more reference each; returns those that were cached until now."""
        refs, holds, stride, page_bytes = self.refs, self.holds, self._stride, self._page_bytes
        woken = []
        page, active, held, loose = -1, 0, 0, 0
        for block in blocks:
            refs[block] += 1
            if refs[block] > 1:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, active, held, loose, 0)
                page, active, held, loose = block * stride // page_bytes, 0, 0, 0
            active += 1
            if holds[block]:
                held -= 1
            else:
                del self.loose[block]
                loose -= 1
            woken.append(block)
        self._shift(page, active, held, loose, 0)
        return woken

    def unref(self, blocks: Iterable[int]) -> list[int]:
        """One reference less each; without any, held or published blocks are cached (and returned), others become empty."""
        refs, holds, published, stride, page_bytes = (
            self.refs,
            self.holds,
            self.published,
            self._stride,
            self._page_bytes,
        )
        cached = []
        page, active, held, loose, empty = -1, 0, 0, 0, 0
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, active, held, loose, empty)
                page, active, held, loose, empty = block * stride // page_bytes, 0, 0, 0, 0
            active -= 1
            if holds[block]:
                held += 1
                cached.append(block)
            elif block in published:
                self.loose[block] = None
                loose += 1
                cached.append(block)
            else:
                self._empty[block] = 1
                empty += 1
        self._shift(page, active, held, loose, empty)
        return cached

    def hold(self, blocks: Iterable[int]) -> None:
        """A checkpoint counts on published blocks."""
        refs, holds, stride, page_bytes = self.refs, self.holds, self._stride, self._page_bytes
        page, moved = -1, 0
        for block in blocks:
            holds[block] += 1
            if holds[block] > 1 or refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, 0, moved, -moved, 0)
                page, moved = block * stride // page_bytes, 0
            del self.loose[block]
            moved += 1
        self._shift(page, 0, moved, -moved, 0)

    def let_go(self, blocks: Iterable[int]) -> None:
        """A checkpoint no longer counts on blocks; cached ones that nobody holds are the last of the loose ones."""
        refs, holds, stride, page_bytes = self.refs, self.holds, self._stride, self._page_bytes
        page, moved = -1, 0
        for block in blocks:
            holds[block] -= 1
            if holds[block] or refs[block]:
                continue
            if block * stride // page_bytes != page:
                self._shift(page, 0, -moved, moved, 0)
                page, moved = block * stride // page_bytes, 0
            self.loose[block] = None
            moved += 1
        self._shift(page, 0, -moved, moved, 0)

    def evict(self, blocks: Iterable[int]) -> list[tuple[bytes, int]]:
        """Loose to empty; returns hashes and logical indices."""
        stride, page_bytes = self._stride, self._page_bytes
        entries = []
        page, moved = -1, 0
        for block in blocks:
            if block * stride // page_bytes != page:
                self._shift(page, 0, 0, -moved, moved)
                page, moved = block * stride // page_bytes, 0
            del self.loose[block]
            self._empty[block] = 1
            entries.append(self.published.pop(block))
            moved += 1
        self._shift(page, 0, 0, -moved, moved)
        return entries

    def move(self, source: int, target: int) -> None:
        """An active block's references, holds and name go to an empty block; `source` becomes empty."""
        self.take(range(target, target + 1))
        self.refs[target], self.refs[source] = self.refs[source], 0
        self.holds[target], self.holds[source] = self.holds[source], 0
        if source in self.published:
            self.published[target] = self.published.pop(source)
        self._empty[source] = 1
        self._shift(source * self._stride // self._page_bytes, -1, 0, 0, 1)

    def _first_block(self, page: int) -> int:
        return -(-page * self._page_bytes // self._stride)

    def _shift(self, page: int, active: int, held: int, loose: int, empty: int) -> None:
        """Blocks of a page changed state, by so many; page -1: nothing did."""
        if page < 0:
            return
        if empty:
            count = self._empty_in[page]
            del self._by_empties[count][page]
            if count + empty == self.per_page:
                self._count(page, active, held, loose)
                self._drop_page(page)
                return
            self._empty_in[page] = count + empty
            self._by_empties[count + empty][page] = None
        self._count(page, active, held, loose)

    def _count(self, page: int, active: int, held: int, loose: int) -> None:
        self.num_active += active
        self.num_held += held
        was_active = self.active_in[page]
        now_active = self.active_in[page] = was_active + active
        now_held = self._held_in[page] = self._held_in[page] + held
        now_loose = self._loose_in[page] = self._loose_in[page] + loose
        if not was_active and now_active:
            del self.idle_pages[page]
            self.num_busy_slots += self.per_page
        elif was_active and not now_active:
            self.idle_pages[page] = None
            self.num_busy_slots -= self.per_page
        if now_active or now_held:
            self.loose_pages.pop(page, None)
        elif page not in self.loose_pages:
            self.loose_pages[page] = None
        if now_active and now_loose:
            self._busy_loose[page] = None
        else:
            self._busy_loose.pop(page, None)

    def _drop_page(self, page: int) -> None:
        first = self._first_block(page)
        self._empty[first : first + self.per_page] = bytes(self.per_page)
        self.num_slots -= self.per_page
        for counts in (self._empty_in, self.active_in, self._held_in, self._loose_in):
            del counts[page]
        del self.idle_pages[page], self.loose_pages[page]
        self._arena.give_back(page)
