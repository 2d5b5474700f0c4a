"""`Arena`: the pages of the KV memory, each free or leased to one KV cache group. Integers only; `ArenaLayout` has the bytes.

A *page* is one of the equal parts of the memory; while a group leases it, it has only that group's blocks. Free pages are kept as
*runs* of consecutive pages. A lease without a preferred page gets the middle of the longest run. So both the new sequence and the
one whose pages are right before the run can grow into consecutive pages. Example with 8 pages: the first lease takes page 0, the
second takes page 4 (the middle of 1 to 7), and each has 3 free pages after it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from transom_core.kv_cache.layout import ArenaLayout

FREE = -1  # in `owner`: no group leases the page


class Arena:
    """Leases pages to groups. Each page of the layout has room for a block of every group (`planner.pages`)."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.num_pages = layout.num_pages
        self.num_free = layout.num_pages
        self.owner = [FREE] * layout.num_pages  # by page
        self._run_starts: list[int] = []  # first pages of the free runs, ascending
        self._run_end: dict[int, int] = {}  # first page of a free run -> one past its last page
        self._longest: list[tuple[int, int]] = []  # heap of (-length, start) of free runs; it may have outdated entries
        if layout.num_pages:
            self._run_starts.append(0)
            self._set_run(0, layout.num_pages)
        self.blocks_per_page = [layout.blocks_per_page(group) for group in range(len(layout.groups))]
        self.waste = max((self._waste(group) for group in range(len(layout.groups))), default=0.0)

    def page_of(self, group: int, block: int) -> int:
        """Return the page that has a block of `group`."""
        return block * self.layout.groups[group].stride_bytes // self.layout.page_bytes

    def blocks(self, page: int, group: int) -> range:
        """Return the block ids of `group` inside `page`."""
        first = self.layout.first_block(page, group)
        return range(first, first + self.blocks_per_page[group])

    def lease(self, group: int, *, prefer: int | None = None) -> int:
        """Lease a free page to `group` and return it: `prefer` if it is free, else one with free pages after it.

        There must be a free page.
        """
        return self.lease_run(group, 1, prefer=prefer)[0]

    def lease_run(self, group: int, num_pages: int, *, prefer: int | None = None) -> range:
        """Lease consecutive free pages to `group` and return them: at least one, at most `num_pages`.

        They begin at `prefer` if that page is free, else at a page with free pages after it. There must be a free page.
        """
        first = prefer
        if first is None or first >= self.num_pages or self.owner[first] != FREE:
            first = self._page_to_grow_from()
        end = self._remove_from_run(first, num_pages)
        self.owner[first:end] = [group] * (end - first)
        self.num_free -= end - first
        return range(first, end)

    def give_back(self, pages: Sequence[int]) -> None:
        """Free leased pages, whose blocks must all be free."""
        owner = self.owner
        for page in pages:
            owner[page] = FREE
        self.num_free += len(pages)
        for start, end in _runs(pages):
            self._add_run(start, end)

    def _page_to_grow_from(self) -> int:
        """Return the middle of the longest free run; page 0 if the run starts there, since no sequence before it grows into it."""
        # Remove outdated entries from the heap until the first one is a run that exists. Lengths in the heap are negative.
        length, start = self._longest[0]
        while self._run_end.get(start) != start - length:
            heappop(self._longest)
            length, start = self._longest[0]
        return start if start == 0 else (start + self._run_end[start]) // 2

    def _set_run(self, start: int, end: int) -> None:
        """Record a free run; the heap is rebuilt when most of its entries are outdated."""
        self._run_end[start] = end
        heappush(self._longest, (start - end, start))
        if len(self._longest) > 4 * self.num_pages + 64:
            self._longest = [(begin - stop, begin) for begin, stop in self._run_end.items()]
            heapify(self._longest)

    def _add_run(self, start: int, end: int) -> None:
        """Add free pages, and join them with the free runs beside them."""
        at = bisect_left(self._run_starts, start)
        if at < len(self._run_starts) and self._run_starts[at] == end:
            end = self._run_end.pop(self._run_starts.pop(at))
        if at and self._run_end[self._run_starts[at - 1]] == start:
            start = self._run_starts[at - 1]
        else:
            self._run_starts.insert(at, start)
        self._set_run(start, end)

    def _remove_from_run(self, first: int, num_pages: int) -> int:
        """Remove at most `num_pages` pages from `first` on from their free run; return the end of those that were removed."""
        at = bisect_right(self._run_starts, first) - 1
        start = self._run_starts[at]
        run_end = self._run_end[start]
        end = min(run_end, first + num_pages)
        if start < first:
            self._set_run(start, first)
            at += 1
        else:
            del self._run_starts[at], self._run_end[start]
        if end < run_end:
            self._run_starts.insert(at, end)
            self._set_run(end, run_end)
        return end

    def _waste(self, group: int) -> float:
        """Return the fraction of the pages' bytes that no block covers if the group leases all pages."""
        used_bytes = self.blocks_per_page[group] * self.layout.groups[group].stride_bytes
        return 1.0 - used_bytes / max(1, self.layout.page_bytes)


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive pages as (first, one past the last). The pages of a run may be in ascending or descending
    order."""
    runs: list[tuple[int, int]] = []
    start = end = -1
    for page in pages:
        if page == end:
            end += 1
        elif page == start - 1 and end >= 0:
            start = page
        else:
            if end >= 0:
                runs.append((start, end))
            start, end = page, page + 1
    if end >= 0:
        runs.append((start, end))
    return runs
