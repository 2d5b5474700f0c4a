"""Hit search: the largest boundary at which every group has its live blocks. The same code runs on a worker and on a mirror.

Legend: a boundary `u` stands after `u` units (blocks) of the chain; block `i` holds unit `i`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transom_worker.kvcache.retention import Retention

_PIECE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """`num_units` can be reused; groups that keep everything reach `full_reach` (where windows could be repaired)."""

    num_units: int
    full_reach: int
    limit: int  # boundary that the last-token rule and the prompt's length allow


def hit_limit(num_tokens: int, block_size: int) -> int:
    """Boundaries up to this one leave at least one token to compute."""
    return max(0, num_tokens - 1) // block_size


def find_hit(
    retentions: Sequence[Retention],
    found: Sequence[Collection[bytes]],
    digests: Sequence[bytes],
    limit: int,
) -> Hit:
    """Largest `u <= limit` such that in every group `g` the blocks of `live(u * block_size)` are in `found[g]`.

    Any monotone `live` works: a block missing at `i` rules out every boundary in `(i, u]`, since lower bounds grow with n.
    Linear in `limit` per group.
    """
    limit = min(limit, len(digests))
    reach = limit
    for retention, group in zip(retentions, found, strict=True):
        if retention.keeps_everything:
            reach = _leading(group, digests, reach)
    searches = [
        _WindowSearch(retention, group, digests, reach)
        for retention, group in zip(retentions, found, strict=True)
        if not retention.keeps_everything
    ]
    at, settled = reach, False
    while not settled:
        before = at
        for search in searches:
            at = search.largest_boundary(at)
        settled = at == before or len(searches) == 1
    return Hit(num_units=at, full_reach=reach, limit=limit)


def _leading(group: Collection[bytes], digests: Sequence[bytes], end: int) -> int:
    """How many of the first `end` digests are found without a gap."""
    for begin in range(0, end, _PIECE):
        stop = min(end, begin + _PIECE)
        gap = _presence(group, digests[begin:stop]).find(0)
        if gap >= 0:
            return begin + gap
    return end


def _presence(group: Collection[bytes], digests: Sequence[bytes]) -> bytes:
    return bytes(map(group.__contains__, digests))


class _WindowSearch:
    """One sliding group: which boundaries have their pinned and live blocks."""

    def __init__(self, retention: Retention, group: Collection[bytes], digests: Sequence[bytes], end: int) -> None:
        self._first = retention.first_live_at(end)
        self._free = retention.free_boundaries(end)
        self._presence = _presence(group, digests[:end])
        pinned = min(retention.num_pinned, end)
        missing = self._presence.find(0, 0, pinned)
        self._pinned_limit = end if missing < 0 else missing  # beyond it a pinned block is missing

    def largest_boundary(self, at: int) -> int:
        """Largest good boundary <= `at`."""
        at = min(at, self._pinned_limit)
        rfind, first, free = self._presence.rfind, self._first, self._free
        while at > 0:
            missing = rfind(0, first[at], at)
            if missing < 0:
                return at
            # the boundary must follow a present block, or need nothing
            at = rfind(1, 0, missing) + 1
            if at < free[missing]:
                at = free[missing]
        return 0
