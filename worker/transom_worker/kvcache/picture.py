"""A cheap copy of the cache's state, for who wants to look at blocks without stopping the engine for long.

Everything is copied by calls that run at C speed, and nothing is worked out here: that is done elsewhere, from the copy. What only
changes when a block gets or loses its name is told as changes, after a first picture that is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_worker.kvcache.catalog import Catalog
from transom_worker.kvcache.pool import GroupPool

Name = tuple[bytes, int]  # hash, logical index


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPicture:
    """One group's blocks, by block id."""

    refs: list[int]
    holds: list[int]
    empty: bytes  # 1: empty, in a leased page
    names: dict[
        int, Name | None
    ]  # all of a whole picture, else those that changed since the one before; None: lost its name
    cached_since_s: list[float] | None  # of whole pictures: when the last reference went, 0 if never
    num_evicted: dict[str, int]  # since start, by reason
    num_active: int
    num_held: int
    num_loose: int
    num_empty: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePicture:
    """The arena and its groups at one moment. `now_s` is of the cache's clock."""

    whole: bool
    now_s: float
    owners: list[int]  # by page: the group that leases it, or arena.FREE
    free_pages: int
    num_compacted: int  # blocks moved since start; where it grew, tables may have changed anywhere
    num_repairs: int  # since start
    outcome_tokens: dict[str, int]  # since start
    groups: tuple[GroupPicture, ...]


def take_group_pictures(pools: Sequence[GroupPool], catalog: Catalog, *, whole: bool) -> tuple[GroupPicture, ...]:
    """Copy the groups' state now; from the engine's thread. A whole picture begins to note changes of names."""
    if whole:
        catalog.note_renamed(True)
    renamed = catalog.take_renamed()
    evicted = catalog.num_evicted()
    return tuple(
        GroupPicture(
            refs=pool.refs.copy(),
            holds=pool.holds.copy(),
            empty=pool.empties(),
            names=dict(pool.published) if whole else {block: pool.published.get(block) for block in renamed[group]},
            cached_since_s=catalog.cached_since_s(group) if whole else None,
            num_evicted=evicted[group],
            num_active=pool.num_active,
            num_held=pool.num_held,
            num_loose=len(pool.loose),
            num_empty=pool.num_empty,
        )
        for group, pool in enumerate(pools)
    )
