"""`HostFrames`: the host tier's part of a worker's frames: its header fields, its records, and what moved between the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.tiers import HOST
from transom_worker.kvcache.cache_snapshot import HostSnapshot
from transom_worker.telemetry.blockmap.host_records import (
    EXPORTED,
    IMPORTED,
    LOADED,
    SWAPPED,
    Blocks,
    Holders,
    HostRecords,
)
from transom_worker.telemetry.blockmap.snapshot import SWAPPED_PHASE, SequenceSnapshot

Run = tuple[int, int]  # first block, count


class HostFrames:
    """The host tier's part of frames. First `records` must take the copies of all blocks; then `update` applies a snapshot, and the
    other methods return what a frame shows of it.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self.records = HostRecords(layout)
        # id() of a list -> (the list, the result that was computed from it). `_known` has the lists of the last snapshot, `_used`
        # those of the present one.
        self._known: dict[int, tuple[object, Any]] = {}
        self._used: dict[int, tuple[object, Any]] = {}
        self._free_pages = 0

    def update(self, snapshot: HostSnapshot, sequences: Sequence[SequenceSnapshot]) -> None:
        """Apply what changed since the last snapshot."""
        self.records.update(snapshot, self._holders(snapshot, sequences))
        self._free_pages = snapshot.free_pages
        self._known, self._used = self._used, {}

    def header(self, *, whole: bool) -> dict[str, Any]:
        """Return the field `host` of a frame's header."""
        fields: dict[str, Any] = {"free_pages": self._free_pages, "counts": self.records.counts}
        if whole:
            layout = self.records.layout
            fields["num_pages"] = layout.num_pages
            fields["num_blocks"] = [layout.dump_block(group) for group in range(len(layout.groups))]
        return fields

    def runs_of(self, blocks: Sequence[Sequence[int]]) -> list[list[Run]]:
        """Return a sequence's blocks in the host tier, by group, as runs of consecutive ids."""
        runs: list[list[Run]] = self._once(blocks, lambda: [_runs(of_group) for of_group in blocks])
        return runs

    def _holders(self, snapshot: HostSnapshot, sequences: Sequence[SequenceSnapshot]) -> Holders:
        """Return the blocks that swapped sequences, imports, exports and loads need, with the state in which they are shown."""
        holders: Holders = []
        for sequence in sequences:
            if sequence.phase == SWAPPED_PHASE:
                holders.append((SWAPPED, self._of_runs(self.runs_of(sequence.in_host))))
        for imported in snapshot.imports:
            holders.append((IMPORTED, self._of_pairs(imported, ((one.group, one.block) for one in imported))))
        for exported in snapshot.exports:
            pairs = ((one.group, one.block) for one in exported if one.tier == HOST)
            holders.append((EXPORTED, self._of_pairs(exported, pairs)))
        for load in snapshot.loads:
            holders.append((LOADED, self._of_pairs(load, ((copy.group, copy.source) for copy in load))))
        return holders

    def _of_runs(self, runs: list[list[Run]]) -> Blocks:
        """Return runs, which are given by group, as arrays of groups and block ids."""

        def expand() -> Blocks:
            groups = [np.full(count, group) for group, of_group in enumerate(runs) for _, count in of_group]
            blocks = [np.arange(first, first + count) for of_group in runs for first, count in of_group]
            return _joined(groups), _joined(blocks)

        found: Blocks = self._once(runs, expand)
        return found

    def _of_pairs(self, source: object, pairs: Iterable[tuple[int, int]]) -> Blocks:
        """Return (group, block) pairs, which are made from the list `source`, as arrays of groups and block ids."""

        def split() -> Blocks:
            array = np.array(list(pairs), np.int64).reshape(-1, 2)
            return array[:, 0], array[:, 1]

        found: Blocks = self._once(source, split)
        return found

    def _once(self, source: object, make: Any) -> Any:
        """Return the result of `make` for a list that never changes; `make` is called when the list is first seen."""
        key = id(source)  # unambiguous, since the entry keeps the list
        entry = self._used.get(key) or self._known.get(key) or (source, make())
        self._used[key] = entry
        return entry[1]


def _runs(blocks: Sequence[int]) -> list[Run]:
    """Return block ids as runs of consecutive ids, in order."""
    ids = np.array(blocks, np.int64)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(ids) != 1])) if ids.size else ids
    counts = np.diff(np.append(starts, ids.size))
    return list(zip(ids[starts].tolist(), counts.tolist(), strict=True))


def _joined(arrays: list[Any]) -> Any:
    return np.concatenate([np.array([], np.int64), *arrays])
