"""A cheap copy of the cache's state, for who wants to look at blocks without stopping the engine for long.

The first picture copies everything by calls that run at C speed; those after it have the blocks that changed since. Nothing is
worked out here: that is done elsewhere, from the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_worker.kvcache.catalog import Catalog
from transom_worker.kvcache.pool import GroupPool

Name = tuple[bytes, int]  # hash, logical index


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPicture:
    """One group's blocks: all of a whole picture, else those that may have changed since the one before."""

    blocks: list[int] | None  # ids, in the order of `refs` and `holds`; None: all, from 0 on
    refs: list[int]
    holds: list[int]
    names: dict[int, Name | None]  # of these blocks; where all are told, of those that have one
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
    """Copy the groups' state now; from the engine's thread. A whole picture begins to note what changes."""
    if whole:
        catalog.note_touched(True)
    touched, evicted = catalog.take_touched(), catalog.num_evicted()
    pictures = []
    for group, pool in enumerate(pools):
        blocks = None if whole else list(touched[group])
        pictures.append(
            GroupPicture(
                blocks=blocks,
                refs=pool.refs.copy() if blocks is None else list(map(pool.refs.__getitem__, blocks)),
                holds=pool.holds.copy() if blocks is None else list(map(pool.holds.__getitem__, blocks)),
                names=dict(pool.published)
                if blocks is None
                else dict(zip(blocks, map(pool.published.get, blocks), strict=True)),
                cached_since_s=catalog.cached_since_s(group) if whole else None,
                num_evicted=evicted[group],
                num_active=pool.num_active,
                num_held=pool.num_held,
                num_loose=len(pool.loose),
                num_empty=pool.num_empty,
            )
        )
    return tuple(pictures)
