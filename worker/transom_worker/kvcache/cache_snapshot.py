"""A cheap copy of the cache's state, for who wants to look at blocks without stopping the engine for long.

It begins with copies of all blocks of each group, by calls that run at C speed: one group at a time, so that steps can run in
between. CacheSnapshots after them have the blocks that changed since. Nothing is worked out here: that is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.block_registry import BlockRegistry
from transom_worker.kvcache.compaction import Compaction
from transom_worker.kvcache.pool import GroupPool
from transom_worker.kvcache.prefix_outcome import OutcomeCounts

Name = tuple[bytes, int]  # hash, logical index


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCopy:
    """All blocks of one group, by id. `now_s` is of the cache's clock."""

    now_s: float
    refs: list[int]
    pins: list[int]
    names: dict[int, Name]  # of those that have one
    cached_since_s: list[float]  # when the last reference went, 0 if never


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One group's counts, and the blocks that may have changed since the picture before."""

    blocks: list[int]  # ids, in the order of `refs`, `holds` and `names`
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
    num_compacted: int  # blocks moved since start; where it grew, tables may have changed anywhere
    num_repairs: int  # since start
    outcome_tokens: dict[str, int]  # since start
    groups: tuple[GroupSnapshot, ...]


class CacheSnapshots:
    """Takes snapshots of one cache: after `begin`, a `copy` of each group, then `take` as often as wanted, until `end`.

    Only on the engine's thread.
    """

    def __init__(
        self,
        arena: Arena,
        pools: Sequence[GroupPool],
        registry: BlockRegistry,
        compaction: Compaction,
        outcomes: OutcomeCounts,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._arena = arena
        self._pools = pools
        self._registry = registry
        self._compaction = compaction
        self._outcomes = outcomes
        self._clock = clock

    def begin(self) -> None:
        """Somebody looks at blocks: note for `take` what changes from now on."""
        self._registry.note_touched(True)

    def end(self) -> None:
        """Nobody looks at blocks any more: note nothing."""
        self._registry.note_touched(False)

    def copy(self, group: int) -> GroupCopy:
        """All blocks of a group now."""
        pool = self._pools[group]
        return GroupCopy(
            now_s=self._clock(),
            refs=pool.refs.copy(),
            pins=pool.pins.copy(),
            names=dict(pool.published),
            cached_since_s=self._registry.cached_since_s(group),
        )

    def take(self) -> CacheSnapshot:
        """Counts and owners, and the blocks that changed since the picture before, or since `begin`."""
        return CacheSnapshot(
            owners=self._arena.owner.copy(),
            free_pages=self._arena.num_free,
            num_compacted=self._compaction.num_moved,
            num_repairs=self._outcomes.num_repairs,
            outcome_tokens=dict(self._outcomes.tokens),
            groups=self._take_groups(),
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
            for group, pool in enumerate(self._pools)
        )
