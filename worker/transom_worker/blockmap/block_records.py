"""Every block's record, as whole arrays: kept up to date from snapshots, and what changed in each.

All groups' blocks stand one behind the other in each array. Legend:

    N  all block ids of all groups      R  records that are told
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transom_worker.blockmap.frame import Words
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.picture import CachePicture, GroupPicture, Name

GONE, EMPTY, ACTIVE, LOOSE, HELD, REPAIRED, EVICTED = range(7)
UNKNOWN = 0xFFFFFFFF
MAX_REFERENCES = np.uint32(0xFFFF)
_HASH_CHARS = 4
_STATE_SHIFT, _REFS_SHIFT = np.uint32(8), np.uint32(16)


class BlockRecords:
    """States, references, names and ages. `update`, then `changed` or `present`; afterwards all counts as told."""

    def __init__(self, layout: ArenaLayout) -> None:
        counts = [layout.dump_block(group) for group in range(len(layout.groups))]
        self.offsets = [sum(counts[:group]) for group in range(len(counts))]
        self.counts = counts
        total = sum(counts)
        self._group: Words = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)  # [N]
        self._id: Words = np.concatenate([np.arange(count, dtype=np.uint32) for count in counts] or [_words(0)])  # [N]
        self._page = np.concatenate([_pages(layout, group) for group in range(len(counts))] or [np.zeros(0, np.int64)])
        self._owners: list[int] = []
        self._leased = np.zeros(total, bool)
        self._lists: list[tuple[list[int], list[int]]] = [([], []) for _ in counts]  # refs and holds as last seen
        self._refs = np.zeros(total, np.uint32)
        self._held = np.zeros(total, bool)
        self._empty = np.zeros(total, bool)
        self._plain = np.zeros(total, np.uint8)  # state, but for what was evicted just now
        self._told: Words = _words(total)  # first word of each record
        self._shown: Words = _words(total)
        self._logical: Words = np.full(total, UNKNOWN, np.uint32)
        self._hash: Words = _words(total)
        self._before = (self._logical.copy(), self._hash.copy())
        self._since_s = np.full(total, np.nan)
        self.shows_evicted = False

    def place(self, group: int, logical: int, blocks: list[int]) -> None:
        """A sequence was given these blocks, for logical indices from `logical` on. Before `update`."""
        at = np.array(blocks) + self.offsets[group]
        self._logical[at] = np.arange(logical, logical + len(blocks))

    def update(self, picture: CachePicture, time_s: float, repaired: Iterable[tuple[int, int, int]]) -> None:
        """Take a picture; `repaired` are (group, first block, count) of sequences that repair their windows."""
        self._lease(picture.owners)
        for group, blocks in enumerate(picture.groups):
            self._update_group(group, blocks)
        plain = np.where(self._refs > 0, ACTIVE, np.where(self._held, HELD, np.where(self._empty, EMPTY, LOOSE)))
        plain = np.where(self._leased, plain, GONE).astype(np.uint8)
        for group, block, count in repaired:
            begin = self.offsets[group] + block
            part = plain[begin : begin + count]
            part[part == ACTIVE] = REPAIRED
        nothing = plain <= EMPTY
        self._logical[nothing], self._hash[nothing] = UNKNOWN, 0
        was_cached = (self._plain == LOOSE) | (self._plain == HELD)
        evicted = was_cached & (nothing | (self._hash != self._before[1]))
        self._since_s[(plain != self._plain) | evicted] = time_s
        if picture.whole:
            self._set_ages(picture, time_s, plain)
        self._plain = plain
        self._show(np.where(evicted, np.uint8(EVICTED), plain))
        self.shows_evicted = bool(evicted.any())

    def settle(self) -> None:
        """Nothing changed since, and what was evicted gets its plain state."""
        self._show(self._plain)
        self.shows_evicted = False

    def take_changed(self, time_s: float) -> Words:
        """Records that are not as they were told; afterwards they are."""
        logical, hashes = self._before
        changed = (self._shown != self._told) | (self._logical != logical) | (self._hash != hashes)
        at = np.flatnonzero(changed)
        self._told = self._shown
        logical[at], hashes[at] = self._logical[at], self._hash[at]
        return self._records(at, time_s)

    def present(self, time_s: float) -> Words:
        """Records of all blocks in leased pages, as they were told last."""
        return self._records(np.flatnonzero((self._told >> 8) & 0xFF), time_s)

    def _records(self, at: NDArray[np.int64], time_s: float) -> Words:
        ages = np.maximum(time_s - self._since_s[at], 0.0) * 10
        records = np.empty((at.size, 5), np.uint32)  # [R, 5]
        records[:, 0] = self._told[at]
        records[:, 1] = self._id[at]
        records[:, 2] = self._before[0][at]
        records[:, 3] = self._before[1][at]
        records[:, 4] = np.where(np.isnan(ages), UNKNOWN, np.minimum(np.nan_to_num(ages), UNKNOWN - 1))
        return records.reshape(-1)

    def _show(self, state: NDArray[np.uint8]) -> None:
        self._shown = (
            self._group
            | (state.astype(np.uint32) << _STATE_SHIFT)
            | (np.minimum(self._refs, MAX_REFERENCES) << _REFS_SHIFT)
        )

    def _lease(self, owners: list[int]) -> None:
        if owners != self._owners:
            self._owners = owners
            by_page = np.array([*owners, -1])  # the last is for ids in no page
            self._leased = by_page[self._page] == self._group

    def _update_group(self, group: int, picture: GroupPicture) -> None:
        """Take over references, holds, empties and names."""
        begin, count = self.offsets[group], self.counts[group]
        refs, holds = self._lists[group]
        if picture.refs != refs:
            self._refs[begin : begin + count] = _numbers(picture.refs)[:count]
        if picture.holds != holds:
            self._held[begin : begin + count] = _numbers(picture.holds)[:count] > 0
        self._lists[group] = (picture.refs, picture.holds)
        self._rename(begin, picture.names)
        self._empty[begin : begin + count] = np.frombuffer(picture.empty, np.uint8)[:count]

    def _rename(self, begin: int, names: Mapping[int, Name | None]) -> None:
        if not names:
            return
        at = np.fromiter(names, np.int64, len(names)) + begin
        hashes = b"".join([bytes(_HASH_CHARS) if name is None else name[0][:_HASH_CHARS] for name in names.values()])
        self._hash[at] = np.frombuffer(hashes, ">u4")
        named = [(block, name[1]) for block, name in names.items() if name is not None]
        if named:
            blocks, logical = zip(*named, strict=True)
            self._logical[np.array(blocks) + begin] = logical

    def _set_ages(self, picture: CachePicture, time_s: float, plain: NDArray[np.uint8]) -> None:
        """Nobody looked until now: how long cached blocks lie is known, nothing else."""
        self._since_s[:] = np.nan
        for group, begin, count in zip(picture.groups, self.offsets, self.counts, strict=True):
            since_s = np.array(group.cached_since_s)[:count] + (time_s - picture.now_s)
            cached = np.isin(plain[begin : begin + count], (LOOSE, HELD))
            self._since_s[begin : begin + count][cached] = since_s[cached]


def _words(count: int) -> Words:
    return np.zeros(count, np.uint32)


def _numbers(values: list[int]) -> NDArray[Any]:
    """Small non-negative numbers: by bytes, which is three times as fast, where they fit."""
    try:
        return np.frombuffer(bytes(values), np.uint8)
    except ValueError:
        return np.array(values, np.uint32)


def _pages(layout: ArenaLayout, group: int) -> NDArray[np.int64]:
    """By block id, the page that owns it; the number of pages where none does."""
    pages = np.full(layout.dump_block(group), layout.num_pages, np.int64)
    page = np.arange(layout.num_pages)
    first = -(-page * layout.page_bytes // layout.groups[group].stride_bytes)
    for nth in range(layout.blocks_per_page(group)):
        pages[first + nth] = page
    return pages
