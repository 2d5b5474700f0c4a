"""`BlockRecords`: keeps a record of every block on the device, updated from snapshots of the cache at a cost that grows only with
the number of changed blocks.

Each array has the blocks of all groups, one group after the other. Legend:

    N  all blocks of all groups      A  indices into these arrays that may have changed      R  records of a frame

A record is five 32-bit words: state word, block id in its group, logical index, prefix hash, and age in tenths of a second. The
state word:

    bits   31 ... 16     15 ... 8     7 ... 0
           references    state        group
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.cache_snapshot import CacheSnapshot, GroupCopy, GroupSnapshot, Name
from transom_worker.telemetry.blockmap.frame import Words

# gone: its page is free; loose: evictable; held: pinned by a checkpoint; repaired: active, in a window repair
GONE, EMPTY, ACTIVE, LOOSE, HELD, REPAIRED, EVICTED = range(7)
UNKNOWN = 0xFFFFFFFF
MAX_REFERENCES = np.uint32(0xFFFF)
_HASH_CHARS = 4
_STATE_SHIFT, _REFS_SHIFT = np.uint32(8), np.uint32(16)

Indices = NDArray[np.int64]  # [A]
Run = tuple[int, int, int]  # group, first block, count


class BlockRecords:
    """The state, references, prefix hash and age of every block.

    Call `start` with each group first. Then call `update` or `settle`, and after each `take_changed`, which returns the records
    that differ from those in earlier frames. `present` returns all records as the frames so far have shown them.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._counts = [layout.dump_block(group) for group in range(len(layout.groups))]
        self._offsets = [sum(self._counts[:group]) for group in range(len(self._counts))]
        total = sum(self._counts)
        self._group: Words = np.repeat(np.arange(len(self._counts), dtype=np.uint32), self._counts)  # [N], as all below
        self._leased = np.zeros(total, bool)
        self._refs: Words = np.zeros(total, np.uint32)
        self._held = np.zeros(total, bool)
        self._named = np.zeros(total, bool)
        self._repairs = np.zeros(total, bool)
        self._plain = np.zeros(total, np.uint8)  # states other than "just evicted"
        self._logical: Words = np.full(total, UNKNOWN, np.uint32)
        self._hash: Words = np.zeros(total, np.uint32)
        self._since_s = np.full(total, np.nan)
        self._word: Words = np.zeros(total, np.uint32)  # state word of each record
        self._sent = (self._word.copy(), self._logical.copy(), self._hash.copy())
        self._owners: NDArray[np.int64] = np.full(layout.num_pages, -1)
        self._is_first = True
        self._in_repair = _indices([])
        self._evicted = _indices([])
        self._maybe_changed = _indices([])

    @property
    def shows_evicted(self) -> bool:
        """Whether any block is shown as just evicted."""
        return self._evicted.size > 0

    def start(self, group: int, copy: GroupCopy, time_s: float) -> None:
        """Take all blocks of a group, before the first `update`. Ages are known only for cached blocks."""
        begin, count = self._offsets[group], self._counts[group]
        self._refs[begin : begin + count] = _numbers(copy.refs)[:count]
        self._held[begin : begin + count] = _numbers(copy.pins)[:count] > 0
        self._name(np.fromiter(copy.names, np.int64, len(copy.names)) + begin, copy.names.values())
        since_s = np.array(copy.cached_since_s)[:count]
        self._since_s[begin : begin + count] = np.where(since_s > 0, since_s + time_s - copy.now_s, np.nan)

    def place(self, group: int, logical: int, blocks: list[int]) -> None:
        """Note that a sequence has got `blocks` for the logical indices from `logical` on. Call this before `update`."""
        self._logical[np.array(blocks) + self._offsets[group]] = np.arange(logical, logical + len(blocks))

    def update(self, snapshot: CacheSnapshot, time_s: float, repaired: Iterable[Run]) -> list[int]:
        """Apply a snapshot, and return the pages whose owner has changed. `repaired` are the blocks that are in window repair."""
        pages, moved = self._lease(snapshot.owners)
        touched = [self._take_group(group, blocks) for group, blocks in enumerate(snapshot.groups)]
        in_repair = self._repair(repaired)
        if self._is_first:
            at: Indices = np.arange(self._word.size)
        else:
            at = np.unique(np.concatenate([moved, *touched, *in_repair, self._evicted]))
        plain = self._states(at)
        nothing = at[plain <= EMPTY]  # blocks without contents
        self._logical[nothing], self._hash[nothing] = UNKNOWN, 0
        before = self._plain[at]
        # Evicted: the block was cached in the last frame, and now has no contents or others.
        evicted = (before == LOOSE) | (before == HELD)
        evicted &= (plain <= EMPTY) | (self._hash[at] != self._sent[2][at])
        if self._is_first:
            self._since_s[(plain != LOOSE) & (plain != HELD)] = np.nan
        else:
            self._since_s[at[(plain != before) | evicted]] = time_s
        self._plain[at], self._is_first = plain, False
        self._evicted = at[evicted]
        self._show(at, np.where(evicted, np.uint8(EVICTED), plain))
        return pages

    def settle(self) -> None:
        """Give blocks that are shown as just evicted their plain state; call this if nothing else has changed."""
        at, self._evicted = self._evicted, _indices([])
        self._show(at, self._plain[at])

    def take_changed(self, time_s: float) -> Words:
        """Take the records that differ from those in earlier frames; afterwards they count as sent."""
        at, now = self._maybe_changed, (self._word, self._logical, self._hash)
        changed = np.zeros(at.size, bool)
        for sent, values in zip(self._sent, now, strict=True):
            changed |= sent[at] != values[at]
        at = at[changed]
        for sent, values in zip(self._sent, now, strict=True):
            sent[at] = values[at]
        return self._records(at, time_s)

    def present(self, time_s: float) -> Words:
        """Return the records of all blocks in leased pages, as the last frames have shown them."""
        return self._records(np.flatnonzero((self._sent[0] >> _STATE_SHIFT) & 0xFF), time_s)

    def _records(self, at: Indices, time_s: float) -> Words:
        ages = np.maximum(time_s - self._since_s[at], 0.0) * 10
        records = np.empty((at.size, 5), np.uint32)  # [R, 5]
        records[:, 0] = self._sent[0][at]
        records[:, 1] = at - np.array(self._offsets, np.int64)[self._group[at]]
        records[:, 2] = self._sent[1][at]
        records[:, 3] = self._sent[2][at]
        records[:, 4] = np.where(np.isnan(ages), UNKNOWN, np.minimum(np.nan_to_num(ages), UNKNOWN - 1))
        return records.reshape(-1)

    def _states(self, at: Indices) -> NDArray[np.uint8]:
        """Return the states of blocks: the first that applies of gone, repaired or active, held, loose, empty."""
        active = np.where(self._repairs[at], REPAIRED, ACTIVE)
        cached = np.where(self._held[at], HELD, np.where(self._named[at], LOOSE, EMPTY))
        states = np.where(self._refs[at] > 0, active, cached)
        return np.where(self._leased[at], states, GONE).astype(np.uint8)

    def _show(self, at: Indices, states: NDArray[np.uint8]) -> None:
        references = np.minimum(self._refs[at], MAX_REFERENCES) << _REFS_SHIFT
        self._word[at] = self._group[at] | (states.astype(np.uint32) << _STATE_SHIFT) | references
        self._maybe_changed = at

    def _lease(self, owners: list[int]) -> tuple[list[int], Indices]:
        """Return the pages whose owner has changed, and their blocks in the old and in the new group."""
        now = np.array(owners, np.int64)
        pages = np.flatnonzero(now != self._owners)
        moved = [_indices([])]
        for page in pages.tolist():
            for owner in (int(self._owners[page]), owners[page]):
                if owner >= 0:
                    first = self._offsets[owner] + self._layout.first_block(page, owner)
                    blocks = np.arange(first, first + self._layout.blocks_per_page(owner))
                    self._leased[blocks] = owner == owners[page]
                    moved.append(blocks)
        self._owners = now
        return pages.tolist(), np.concatenate(moved)

    def _take_group(self, group: int, snapshot: GroupSnapshot) -> Indices:
        """Copy references, pins and names of the changed blocks; return their indices."""
        at = _indices(snapshot.blocks) + self._offsets[group]
        self._refs[at] = _numbers(snapshot.refs)
        self._held[at] = _numbers(snapshot.pins) > 0
        self._name(at, snapshot.names)
        return at

    def _name(self, at: Indices, names: Collection[Name | None]) -> None:
        if not names:
            return
        hashes = b"".join([bytes(_HASH_CHARS) if name is None else name[0][:_HASH_CHARS] for name in names])
        self._hash[at] = np.frombuffer(hashes, ">u4")
        logical = np.array([-1 if name is None else name[1] for name in names], np.int64)
        named = logical >= 0
        self._named[at] = named
        self._logical[at[named]] = logical[named]

    def _repair(self, repaired: Iterable[Run]) -> tuple[Indices, Indices]:
        """Mark the blocks in window repair; return those that were in repair before, and those that are now."""
        before = self._in_repair
        now = np.concatenate(
            [_indices([]), *(self._offsets[g] + np.arange(block, block + count) for g, block, count in repaired)]
        )
        self._repairs[before], self._repairs[now] = False, True
        self._in_repair = now
        return before, now


def _indices(indices: list[int]) -> Indices:
    return np.array(indices, np.int64)


def _numbers(values: list[int]) -> NDArray[Any]:
    """Return an array of small non-negative numbers; if they fit in bytes, through bytes, which is three times as fast."""
    try:
        return np.frombuffer(bytes(values), np.uint8)
    except ValueError:
        return np.array(values, np.uint32)
