"""`CacheSnapshots` and `HostSnapshots`: make cheap copies of the state of the device's blocks, and of the host tier's, for the
block map (a live view of every block).

Copying must not stop the engine's thread for long. So at first all blocks are copied, one group at a time, and steps can run in
between; copying a group is a few calls that run at C speed. Later snapshots have only the blocks that changed since the last one.
Readers use the copies on other threads.

A host tier may have a hundred times as many blocks as the device. So its first copy is made in pieces of a few pages. A *leftover*
is a host block in the index that nothing needs (`host_tier`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.compaction import Compaction
from transom_worker.kvcache.prefix.prefix_outcome import OutcomeCounts
from transom_worker.kvcache.tiers.tiers import Tiers

Name = tuple[bytes, int]  # (digest, logical index in its chain) of a published block


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCopy:
    """All blocks of one group, by block id. `now_s` is the cache's clock at the copy."""

    now_s: float
    refs: list[int]  # references of running sequences
    pins: list[int]  # pins of checkpoints
    names: dict[int, Name]  # published block -> its name
    cached_since_s: list[float]  # when the last reference was removed, 0 if never


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One group's blocks by state, and the blocks that may have changed since the last snapshot."""

    blocks: list[int]  # ids, in the order of `refs`, `pins` and `names`
    refs: list[int]
    pins: list[int]
    names: list[Name | None]
    num_evicted: dict[str, int]  # since start, by reason
    num_active: int
    num_pinned: int
    num_evictable: int
    num_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """The arena and its groups at one moment."""

    owners: list[int]  # by page: the group that leases it, or arena.FREE
    free_pages: int
    # Blocks that compaction moved since start; if the number grew, any sequence's block table may have changed.
    num_compacted: int
    num_repairs: int  # window repairs (computing cached tokens again for sliding groups) since start
    outcome_tokens: dict[str, int]  # prompt tokens since start: "hit", "repaired" or "missed_<reason>"
    groups: tuple[GroupSnapshot, ...]
    host: HostSnapshot | None  # None without a host tier


class CacheSnapshots:
    """Takes snapshots of one cache: call `begin`, `copy` for each group, then `take` as often as needed, then `end`.

    All calls are made on the engine's thread.
    """

    def __init__(
        self,
        registry: BlockRegistry,
        compaction: Compaction,
        outcomes: OutcomeCounts,
        tiers: Tiers,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._registries = (registry, tiers.host.registry)
        self._compaction = compaction
        self._outcomes = outcomes
        self.host = HostSnapshots(tiers) if tiers.host.exists else None
        self._clock = clock

    def begin(self) -> None:
        """Begin to record which blocks change."""
        for registry in self._registries:
            registry.watch_changes(True)

    def end(self) -> None:
        """Stop recording which blocks change."""
        for registry in self._registries:
            registry.watch_changes(False)

    def copy(self, group: int) -> GroupCopy:
        """Return a copy of all blocks of a group."""
        pool = self._registry.pools[group]
        return GroupCopy(
            now_s=self._clock(),
            refs=pool.refs.copy(),
            pins=pool.pins.copy(),
            names=dict(pool.published),
            cached_since_s=self._registry.times[group].since_s(),
        )

    def take(self) -> CacheSnapshot:
        """Return pages and counts, and the blocks that changed since the last call, or since `begin`."""
        return CacheSnapshot(
            owners=self._registry.arena.owner.copy(),
            free_pages=self._registry.arena.num_free,
            num_compacted=self._compaction.num_moved,
            num_repairs=self._outcomes.num_repairs,
            outcome_tokens=dict(self._outcomes.tokens),
            groups=self._take_groups(),
            host=None if self.host is None else self.host.take(),
        )

    def _take_groups(self) -> tuple[GroupSnapshot, ...]:
        touched, evicted = self._registry.take_touched(), self._registry.num_evicted()
        return tuple(
            GroupSnapshot(
                blocks=(blocks := list(touched[group])),
                refs=list(map(pool.refs.__getitem__, blocks)),
                pins=list(map(pool.pins.__getitem__, blocks)),
                names=list(map(pool.published.get, blocks)),
                num_evicted=evicted[group],
                num_active=pool.num_active,
                num_pinned=pool.num_pinned,
                num_evictable=len(pool.evictable),
                num_free=pool.num_free,
            )
            for group, pool in enumerate(self._registry.pools)
        )


BLOCKS_PER_COPY = 2**14  # of one piece of the first copy, which the engine's thread makes between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroupChanges:
    """Those of one group's blocks that may have changed since the last snapshot, or that no snapshot had yet."""

    blocks: list[int]  # ids, in the order of `needs` and `leftover`
    needs: list[int]  # how often the block is needed (`host_tier`)
    leftover: list[bool]  # whether the block is in the index and nothing needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """The host tier at one moment: its changed blocks."""

    free_pages: int
    groups: tuple[HostGroupChanges, ...]
    # Blocks since start, by kind and group: spilled, loaded, swapped, imported, and dropped (evicted).
    moves: dict[str, list[int]]


class HostSnapshots:
    """Takes snapshots of one host tier. All calls are made on the engine's thread, in this order:

    device_snapshots.begin()      both tiers record from now on which blocks change
    copy(pages)                   once for each of `pieces`
    take()                        as often as needed
    device_snapshots.end()
    """

    def __init__(self, tiers: Tiers) -> None:
        self.layout = tiers.host.layout
        self._tiers = tiers
        self._host = tiers.host

    @property
    def pieces(self) -> list[range]:
        """The pages in pieces of about `BLOCKS_PER_COPY` blocks."""
        layout = self.layout
        # At least one page, even if a page has more than `BLOCKS_PER_COPY` blocks.
        step = max(1, BLOCKS_PER_COPY // sum(map(layout.blocks_per_page, range(len(layout.groups)))))
        return [range(first, min(first + step, layout.num_pages)) for first in range(0, layout.num_pages, step)]

    def copy(self, pages: range) -> list[HostGroupChanges]:
        """Return all blocks in these pages, by group."""
        first, last = pages.start, pages.stop - 1
        return [
            self._changes(group, range(self.layout.first_block(first, group), self.layout.end_block(last, group)))
            for group in range(len(self._host.pools))
        ]

    def take(self) -> HostSnapshot:
        """Return what changed since the last call, or since `begin`."""
        tiers = self._tiers
        touched = self._host.registry.take_touched()
        return HostSnapshot(
            free_pages=self._host.arena.num_free,
            groups=tuple(self._changes(group, touched[group]) for group in range(len(self._host.pools))),
            moves={
                "spilled": tiers.moves.num_spilled.copy(),
                "loaded": tiers.loads.num_loaded.copy(),
                "swapped": self._host.num_swapped_out.copy(),
                "imported": [tiers.imports.num_imported[group] for group in range(len(self._host.pools))],
                "dropped": [sum(reasons.values()) for reasons in self._host.registry.num_evicted()],
            },
        )

    def _changes(self, group: int, blocks: Iterable[int]) -> HostGroupChanges:
        pool, blocks = self._host.pools[group], list(blocks)
        return HostGroupChanges(
            blocks=blocks,
            needs=list(map(pool.refs.__getitem__, blocks)),
            leftover=list(map(pool.evictable.__contains__, blocks)),
        )
