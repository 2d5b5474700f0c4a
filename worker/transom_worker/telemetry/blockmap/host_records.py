"""`HostRecords`: keeps the state of every block of the host tier, updated from snapshots, and encodes runs of blocks in the same
state.

A host tier may have a million blocks. So a block has only a state, neighbours in the same state are one record, and a frame has at
most `MAX_RUNS` records: those that do not fit are sent in later frames. Each array has the blocks of all groups, one group after
the other. Legend:

    N  all blocks of all groups      A  indices into these arrays that may have changed      R  records of a frame

A record is two 32-bit words: the first block's id in its group, and

    bits   31 ... 16       15 ... 8     7 ... 0
           count less 1    state        group

Pages need no records: a group leases a page exactly while one of its blocks there is in use.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.cache_snapshot import HostGroupChanges, HostSnapshot
from transom_worker.telemetry.blockmap.block_records import EMPTY, EVICTED, GONE, HELD, LOOSE
from transom_worker.telemetry.blockmap.frame import Words

STATE_NAMES = {HELD: "held", LOOSE: "loose", EMPTY: "empty"}
MAX_RUNS = 2**14  # 128 KiB
_NUM_STATES = EVICTED + 1
_UNTOLD = 255  # not a state: a whole frame had no room for the block
_MAX_COUNT = 2**16
_STATE_SHIFT, _COUNT_SHIFT = np.uint32(8), np.uint32(16)

Indices = NDArray[np.int64]  # [A]


class HostRecords:
    """The state of every block of the host tier.

    Call `take` with each copy first. Then call `update` or `settle`, and after each `take_changed`, which returns the records that
    differ from those in earlier frames. `present` returns the records as the frames so far have shown them.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        groups = range(len(layout.groups))
        counts = [layout.dump_block(group) for group in groups]
        self._offsets = np.cumsum([0, *counts])
        self._strides = np.array([group.stride_bytes for group in layout.groups], np.int64)
        self._blocks_per_page = np.array([layout.blocks_per_page(group) for group in groups], np.int64)
        total = int(self._offsets[-1])
        self._needed = np.zeros(total, bool)  # [N], as all below
        self._leftover = np.zeros(total, bool)  # in the index, and nothing needs it
        self._plain = np.zeros(total, np.uint8)  # states other than "just evicted"
        self._shown = np.zeros(total, np.uint8)
        self._sent = np.zeros(total, np.uint8)
        self._num_used = np.zeros((len(groups), layout.num_pages), np.int64)  # blocks by group and page
        self._counts = np.zeros((len(groups), _NUM_STATES), np.int64)
        self._is_first = True
        self._flashing, self._pending = _indices(), _indices()
        self._free_pages = 0
        self._next = 0  # the index at which the next frame begins, so that every block gets its turn

    @property
    def is_settled(self) -> bool:
        """Whether a further frame without a new snapshot would be empty."""
        return not (self._flashing.size or self._pending.size)

    def header(self, *, whole: bool) -> dict[str, Any]:
        """Return the field `host` of a frame's header. `counts` has each group's blocks by their present state, whether or not a
        frame has shown it."""
        counts = [{name: int(of_group[state]) for state, name in STATE_NAMES.items()} for of_group in self._counts]
        fields: dict[str, Any] = {"free_pages": self._free_pages, "counts": counts}
        if whole:
            fields["num_pages"] = self.layout.num_pages
            fields["num_blocks"] = [self.layout.dump_block(group) for group in range(len(self.layout.groups))]
        return fields

    def take(self, groups: Sequence[HostGroupChanges]) -> list[Indices]:
        """Take the state of blocks, by group; before the first `update` these are all blocks in some pages.

        Return their indices, and those of the other blocks in pages that were leased or given back by these changes.
        """
        return [self._take_group(group, changes) for group, changes in enumerate(groups)]

    def update(self, snapshot: HostSnapshot) -> None:
        """Apply a snapshot."""
        touched, self._free_pages = self.take(snapshot.groups), snapshot.free_pages
        at: Indices = np.arange(self._plain.size)
        if not self._is_first:
            at = np.unique(np.concatenate([*touched, self._flashing]))
        before, plain = self._plain[at], self._states(at)
        shown = plain.copy()
        if not self._is_first:
            shown[(plain <= EMPTY) & ((before == HELD) | (before == LOOSE))] = EVICTED
        self._count(at, before, plain)
        self._plain[at], self._is_first = plain, False
        self._flashing = at[shown != plain]
        self._show(at, shown)

    def settle(self) -> None:
        """Give blocks that are shown as just evicted their plain state; call this if nothing else has changed."""
        at, self._flashing = self._flashing, _indices()
        self._show(at, self._plain[at])

    def take_changed(self) -> Words:
        """Take at most `MAX_RUNS` records that differ from those in earlier frames; afterwards they count as sent."""
        at = self._pending[self._sent[self._pending] != self._shown[self._pending]]
        begin = int(np.searchsorted(at, self._next))
        records, taken = self._runs(np.concatenate([at[begin:], at[:begin]]))
        self._sent[taken] = self._shown[taken]
        self._pending = np.setdiff1d(at, taken, assume_unique=True) if taken.size < at.size else _indices()
        self._next = int(taken[-1]) + 1 if self._pending.size else 0
        return records

    def present(self) -> Words:
        """Return the records of all blocks in leased pages, as the last frames have shown them: at most `MAX_RUNS`.

        The remaining blocks count as never sent, so that the next frames have them.
        """
        at = np.flatnonzero((self._sent != GONE) & (self._sent != _UNTOLD))
        records, taken = self._runs(at, self._sent)
        left = at[taken.size :]
        self._sent[left] = _UNTOLD
        self._pending = np.union1d(self._pending, left)
        return records

    def _runs(self, at: Indices, states: NDArray[np.uint8] | None = None) -> tuple[Words, Indices]:
        """Return the first `MAX_RUNS` records of these blocks, flat, and the blocks that they have."""
        states = (self._shown if states is None else states)[at]
        groups = np.searchsorted(self._offsets, at, side="right") - 1
        same = (np.diff(at) == 1) & (np.diff(states) == 0) & (np.diff(groups) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~same])) if at.size else _indices()
        starts = _with_cuts(starts, at.size)
        num_taken = at.size if starts.size <= MAX_RUNS else int(starts[MAX_RUNS])
        counts = np.diff(np.append(starts[:MAX_RUNS], num_taken))
        starts = starts[:MAX_RUNS]
        records = np.empty((starts.size, 2), np.uint32)  # [R, 2]
        records[:, 0] = at[starts] - self._offsets[groups[starts]]
        records[:, 1] = groups[starts].astype(np.uint32)
        records[:, 1] |= states[starts].astype(np.uint32) << _STATE_SHIFT
        records[:, 1] |= (counts - 1).astype(np.uint32) << _COUNT_SHIFT
        return records.reshape(-1), at[:num_taken]

    def _states(self, at: Indices) -> NDArray[np.uint8]:
        groups = np.searchsorted(self._offsets, at, side="right") - 1
        states = np.full(at.size, GONE, np.uint8)
        for group in range(len(self._strides)):
            of_group = np.flatnonzero(groups == group)
            pages, is_inside = self._pages(group, at[of_group])
            is_leased = is_inside & (self._num_used[group, np.minimum(pages, self.layout.num_pages - 1)] > 0)
            states[of_group[is_leased]] = EMPTY
        states[self._leftover[at]] = LOOSE
        states[self._needed[at]] = HELD
        return states

    def _show(self, at: Indices, states: NDArray[np.uint8]) -> None:
        self._shown[at] = states
        changed = at[self._sent[at] != states]  # ascending
        self._pending = np.union1d(self._pending, changed) if self._pending.size else changed

    def _count(self, at: Indices, before: NDArray[np.uint8], now: NDArray[np.uint8]) -> None:
        groups = np.searchsorted(self._offsets, at, side="right") - 1
        size = self._counts.size
        for states, sign in ((before, -1), (now, 1)):
            found = np.bincount(groups * _NUM_STATES + states, minlength=size)
            self._counts += sign * found.reshape(self._counts.shape)

    def _take_group(self, group: int, changes: HostGroupChanges) -> Indices:
        """Apply changed blocks; return them and the blocks of pages that the group has leased or given back."""
        at = np.array(changes.blocks, np.int64) + self._offsets[group]
        pages = self._use(group, at, np.array(changes.needs, np.int64) > 0, np.array(changes.leftover, bool))
        per_page = int(self._blocks_per_page[group])
        firsts = -(-pages * self.layout.page_bytes // self._strides[group]) + self._offsets[group]
        return np.concatenate([at, (firsts[:, None] + np.arange(per_page)).reshape(-1)])

    def _use(
        self, group: int, at: Indices, needed: NDArray[np.bool_], leftover: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Note which blocks of a group are needed or leftovers; return the pages that the group has leased or given back."""
        before = self._needed[at] | self._leftover[at]
        self._needed[at], self._leftover[at] = needed, leftover
        pages, _ = self._pages(group, at)
        change = (needed | leftover).astype(np.int64) - before
        is_change = change != 0
        pages = pages[is_change]
        unique: NDArray[np.int64] = np.unique(pages)
        was_used = self._num_used[group, unique] > 0
        np.add.at(self._num_used[group], pages, change[is_change])
        turned: NDArray[np.int64] = unique[was_used != (self._num_used[group, unique] > 0)]
        return turned

    def _pages(self, group: int, at: Indices) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the page in which each of these blocks of a group begins, and whether the block is wholly inside it."""
        blocks, page_bytes = at - self._offsets[group], self.layout.page_bytes
        pages = blocks * self._strides[group] // page_bytes
        firsts = -(-pages * page_bytes // self._strides[group])
        return pages, (blocks - firsts < self._blocks_per_page[group]) & (pages < self.layout.num_pages)


def _with_cuts(starts: Indices, size: int) -> Indices:
    """Add the starts that cut runs of more than `_MAX_COUNT` blocks."""
    counts = np.diff(np.append(starts, size))
    cuts = [np.arange(starts[i] + _MAX_COUNT, starts[i] + counts[i], _MAX_COUNT)
            for i in np.flatnonzero(counts > _MAX_COUNT)]  # fmt: skip
    return np.sort(np.concatenate([starts, *cuts])) if cuts else starts


def _indices() -> Indices:
    return np.array([], np.int64)
