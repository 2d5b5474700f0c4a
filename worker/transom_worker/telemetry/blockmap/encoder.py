"""`Encoder`: makes frames from snapshots, for all watchers of a worker together. It does not run on the engine's thread."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from transom_core.clock import steady_time_s
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.cache_snapshot import GroupCopy, HostGroupChanges
from transom_worker.telemetry.blockmap.block_records import BlockRecords
from transom_worker.telemetry.blockmap.frame import Frame, Words, make_frame
from transom_worker.telemetry.blockmap.host_records import HostRecords
from transom_worker.telemetry.blockmap.log import MAX_EVENTS, History, MapEvent
from transom_worker.telemetry.blockmap.runs import TableRuns
from transom_worker.telemetry.blockmap.snapshot import SequenceSnapshot, Snapshot


class WorkerIdentity(NamedTuple):
    """The worker that the frames are about, its model's name, and the model's identity (`CacheShape`)."""

    worker: str
    model: str
    identity: str = ""


class Encoder:
    """Call `start` with each group first. Then `update` makes a frame of changes, and `whole` a frame of all blocks."""

    def __init__(
        self, identity: WorkerIdentity, layout: ArenaLayout, history: History, host_layout: ArenaLayout | None = None
    ) -> None:
        """`host_layout` is that of the host tier; None without one."""
        self._identity = identity
        self._layout = layout
        self._history = history
        self._records = BlockRecords(layout)
        self._host = None if host_layout is None else HostRecords(host_layout)
        self._tables: dict[int, list[TableRuns]] = {}  # by sequence, by group
        self._sequences: dict[int, dict[str, Any]] = {}  # as the last frames have them
        self._owners: list[int] = [-1] * layout.num_pages
        self._evicted: list[dict[str, int]] = []
        self._moves: dict[str, list[int]] = {}
        self._state: dict[str, Any] = {}  # fields of the last header
        self._has_begun = False

    @property
    def is_settled(self) -> bool:
        """Whether a further frame without a new snapshot would be empty: no block is shown as just evicted, and all changes were
        sent."""
        return not self._records.shows_evicted and (self._host is None or self._host.is_settled)

    def start(self, group: int, copy: GroupCopy) -> None:
        """Take all blocks of one group, before the first `update`."""
        self._records.start(group, copy, steady_time_s())

    def start_host(self, copy: Sequence[HostGroupChanges]) -> None:
        """Take all blocks in some pages of the host tier, before the first `update`."""
        assert self._host is not None
        self._host.take(copy)

    def update(self, snapshot: Snapshot) -> Frame:
        """Make a frame of what changed since the last snapshot."""
        cache = snapshot.cache
        if self._host is not None and cache.host is not None:
            self._host.update(cache.host)
        changed, gone = self._update_sequences(snapshot.sequences)
        pages = self._records.update(cache, snapshot.time_s, self._repaired(snapshot.sequences))
        events, num_dropped = self._events(snapshot)
        self._state = {
            "counts": [
                {"active": g.num_active, "held": g.num_pinned, "loose": g.num_evictable, "empty": g.num_free}
                for g in cache.groups
            ],
            "free_pages": cache.free_pages,
            "running": snapshot.num_running,
            "waiting": snapshot.num_waiting,
            "totals": snapshot.totals,
        }
        self._owners = cache.owners
        happened = {"events": events, "dropped_events": num_dropped, "sequences": changed, "gone": gone}
        return self._frame(
            snapshot.time_s, happened, self._pairs(pages), self._records.take_changed(snapshot.time_s), whole=False
        )

    def again(self, time_s: float) -> Frame:
        """Make a frame without a new snapshot, in which blocks that were shown as just evicted get their plain state."""
        self._records.settle()
        if self._host is not None:
            self._host.settle()
        nothing = {"events": [], "dropped_events": 0, "sequences": [], "gone": []}
        return self._frame(time_s, nothing, self._pairs([]), self._records.take_changed(time_s), whole=False)

    def whole(self, time_s: float) -> Frame:
        """Make a whole frame of the state that the frames so far have shown."""
        fields = {"events": [], "dropped_events": 0, "sequences": list(self._sequences.values()), "gone": []}
        pages = self._pairs(range(len(self._owners)))
        return self._frame(time_s, fields, pages, self._records.present(time_s), whole=True)

    def _frame(self, time_s: float, fields: dict[str, Any], pages: Words, blocks: Words, *, whole: bool) -> Frame:
        header: dict[str, Any] = {"worker": self._identity.worker, "time_s": time_s, "whole": whole}
        header |= self._state | fields
        arrays = {"pages": pages, "blocks": blocks}
        if self._host is not None:
            header["host"] = self._host.header(whole=whole)
            arrays["host_blocks"] = self._host.present() if whole else self._host.take_changed()
        if whole:
            header |= self._geometry()
            header["history"] = self._history.entries(time_s)
        return make_frame(header, arrays)

    def _geometry(self) -> dict[str, Any]:
        layout = self._layout
        groups = [
            {
                "name": group.spec.name,
                "kind": group.spec.kind.value,
                "block_size": group.spec.block_size,
                "stride_bytes": group.stride_bytes,
                "block_bytes": group.block_bytes,
                "num_blocks": layout.dump_block(index),
                "blocks_per_page": layout.blocks_per_page(index),
            }
            for index, group in enumerate(layout.groups)
        ]
        return {
            "model": self._identity.model,
            "identity": self._identity.identity,
            "page_bytes": layout.page_bytes,
            "num_pages": layout.num_pages,
            "groups": groups,
        }

    def _update_sequences(self, snapshots: list[SequenceSnapshot]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the sequences that changed since the last frame, as header fields, and the ids of those that ended."""
        changed, present = [], set()
        for snapshot in snapshots:
            seq_id = snapshot.seq_id
            present.add(seq_id)
            tables = self._tables.setdefault(seq_id, [TableRuns() for _ in snapshot.tables])
            for group, (runs, pieces) in enumerate(zip(tables, snapshot.tables, strict=True)):
                runs.update(pieces)
                for logical, blocks in pieces.pieces:
                    self._records.place(group, logical, blocks)
                for logical, block in pieces.aside:
                    self._records.place(group, logical, [block])
            described = _describe(snapshot, tables)
            if self._sequences.get(seq_id) != described:
                self._sequences[seq_id] = described
                changed.append(described)
        gone = [seq_id for seq_id in self._sequences if seq_id not in present]
        for seq_id in gone:
            del self._sequences[seq_id], self._tables[seq_id]
        return changed, gone

    def _repaired(self, snapshots: list[SequenceSnapshot]) -> list[tuple[int, int, int]]:
        """Return (group, first block, count) of the sliding groups' blocks of sequences that repair their windows."""
        sliding = [g for g, group in enumerate(self._layout.groups) if not group.spec.keeps_everything]
        return [
            (group, block, count)
            for snapshot in snapshots
            if snapshot.replay is not None
            for group in sliding
            for _, block, count in self._tables[snapshot.seq_id][group].sliding()
        ]

    def _pairs(self, pages: Sequence[int]) -> Words:
        """Return pairs (page, owner + 1), flat; 0 stands for no owner."""
        pairs = [(page, self._owners[page] + 1) for page in pages]
        return np.array(pairs, np.uint32).reshape(-1)

    def _events(self, snapshot: Snapshot) -> tuple[list[dict[str, Any]], int]:
        """Return the events since the last frame, with evictions and moves between the tiers by group, and how many older events
        were dropped."""
        evicted = [group.num_evicted for group in snapshot.cache.groups]
        events = list(snapshot.events)
        if self._has_begun:
            for group, (before, now) in enumerate(zip(self._evicted, evicted, strict=True)):
                for reason, count in (Counter(now) - Counter(before)).items():
                    events.append(MapEvent(snapshot.time_s, "evicted", None, group, count, reason))
            events += self._moved(snapshot)
        self._evicted, self._has_begun = evicted, True
        self._moves = {} if snapshot.cache.host is None else snapshot.cache.host.moves
        num_dropped = snapshot.num_dropped_events + max(0, len(events) - MAX_EVENTS)
        return [asdict(event) for event in events[-MAX_EVENTS:]], num_dropped

    def _moved(self, snapshot: Snapshot) -> list[MapEvent]:
        moves = {} if snapshot.cache.host is None else snapshot.cache.host.moves
        return [
            MapEvent(snapshot.time_s, kind, None, group, count, f"{count} blocks")
            for kind, counts in moves.items()
            for group, (before, now) in enumerate(zip(self._moves[kind], counts, strict=True))
            if (count := now - before)
        ]


def _describe(snapshot: SequenceSnapshot, tables: list[TableRuns]) -> dict[str, Any]:
    return {
        "id": snapshot.seq_id,
        "request": snapshot.request_id,
        "phase": snapshot.phase,
        "processed": snapshot.processed,
        "num_tokens": snapshot.num_tokens,
        "num_prompt_tokens": snapshot.num_prompt_tokens,
        "num_cached_tokens": snapshot.num_cached_tokens,
        "repair": snapshot.replay,
        "runs": [table.runs for table in tables],
    }
