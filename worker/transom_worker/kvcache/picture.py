"""A cheap copy of the cache's state, for who wants to look at blocks without stopping the engine for long.

It begins with copies of all blocks of each group, by calls that run at C speed: one group at a time, so that steps can run in
between. Pictures after them have the blocks that changed since. Nothing is worked out here: that is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_worker.kvcache.catalog import Catalog
from transom_worker.kvcache.pool import GroupPool

Name = tuple[bytes, int]  # hash, logical index


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCopy:
    """All blocks of one group, by id. `now_s` is of the cache's clock."""

    now_s: float
    refs: list[int]
    holds: list[int]
    names: dict[int, Name]  # of those that have one
    cached_since_s: list[float]  # when the last reference went, 0 if never


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPicture:
    """One group's counts, and the blocks that may have changed since the picture before."""

    blocks: list[int]  # ids, in the order of `refs`, `holds` and `names`
    refs: list[int]
    holds: list[int]
    names: list[Name | None]
    num_evicted: dict[str, int]  # since start, by reason
    num_active: int
    num_held: int
    num_loose: int
    num_empty: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePicture:
    """The arena and its groups at one moment."""

    owners: list[int]  # by page: the group that leases it, or arena.FREE
    free_pages: int
    num_compacted: int  # blocks moved since start; where it grew, tables may have changed anywhere
    num_repairs: int  # since start
    outcome_tokens: dict[str, int]  # since start
    groups: tuple[GroupPicture, ...]


def copy_group(pool: GroupPool, catalog: Catalog, *, now_s: float) -> GroupCopy:
    """All of a group now; from the engine's thread."""
    return GroupCopy(
        now_s=now_s,
        refs=pool.refs.copy(),
        holds=pool.holds.copy(),
        names=dict(pool.published),
        cached_since_s=catalog.cached_since_s(pool.group),
    )


def take_group_pictures(pools: Sequence[GroupPool], catalog: Catalog) -> tuple[GroupPicture, ...]:
    """What changed since the last call, or since `catalog` began to note it; from the engine's thread."""
    touched, evicted = catalog.take_touched(), catalog.num_evicted()
    return tuple(
        GroupPicture(
            blocks=(blocks := list(touched[group])),
            refs=list(map(pool.refs.__getitem__, blocks)),
            holds=list(map(pool.holds.__getitem__, blocks)),
            names=list(map(pool.published.get, blocks)),
            num_evicted=evicted[group],
            num_active=pool.num_active,
            num_held=pool.num_held,
            num_loose=len(pool.loose),
            num_empty=pool.num_empty,
        )
        for group, pool in enumerate(pools)
    )
