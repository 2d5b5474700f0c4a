"""Hit search: from which boundary a prompt goes on, and where computing starts. The same code runs on a worker and on a mirror.

Legend: a boundary `u` stands after `u` units of the chain. A group's block holds one unit, or `p` of them (compressed groups), and
is found under the digest of its last unit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.window_repair import repair_start

_PIECE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """Tokens below `num_hash_blocks` units need no ordinary computing; the first token to compute is `start`.

    Below `num_hash_blocks` units only where sliding groups are repaired: the groups that keep everything hold
    [0, num_hash_blocks), the
    others get theirs from a replay of [start, num_hash_blocks * unit).
    """

    num_hash_blocks: int
    start: int
    full_groups_reach: int  # units that the groups that keep everything hold
    limit: int  # boundary that the last-token rule and the prompt's length allow


def hit_limit(num_tokens: int, block_size: int) -> int:
    """Boundaries up to this one leave at least one token to compute."""
    return max(0, num_tokens - 1) // block_size


def find_hit(
    retentions: Sequence[Retention],
    found: Sequence[Collection[bytes]],
    digests: Sequence[bytes],
    limit: int,
    *,
    window_repair: bool,
) -> PrefixHit:
    """The hit that leaves least to compute, at a boundary `u <= limit`; `found[g]` are the digests of group `g`'s blocks.

    Either the largest `u` at which every group has its blocks of `live(u)`, or, if that leaves no less, the largest at which those
    that keep everything (and pinned sink blocks) are there and the rest is repaired: a larger boundary is never repaired from
    further back, and shares more blocks. A repair from 0 saves nothing. The smallest block is the hash unit.
    """
    unit = min(retention.block_size for retention in retentions)
    limit = min(limit, len(digests))
    full_groups_reach, reach, repairable = limit, limit, False
    sliding: list[tuple[Retention, Collection[bytes]]] = []
    for retention, group in zip(retentions, found, strict=True):
        if retention.keeps_everything:
            full_groups_reach = _leading(group, digests, full_groups_reach, retention.block_size // unit)
            repairable = window_repair
        else:
            sliding.append((retention, group))
    reach = full_groups_reach
    for retention, group in sliding:
        reach = min(reach, _pinned_reach(group, digests, reach, retention.num_sink_blocks))
    start = repair_start([retention.spec for retention in retentions], reach * unit) // unit if repairable else 0
    # at and below `start` the repair is as good
    at = _largest_boundary([_WindowSearch(*pair, digests, reach) for pair in sliding], reach, floor=start)
    num_hash_blocks = reach if at == start > 0 else at
    return PrefixHit(num_hash_blocks=num_hash_blocks, start=at * unit, full_groups_reach=full_groups_reach, limit=limit)


def _leading(group: Collection[bytes], digests: Sequence[bytes], end: int, units_per_block: int) -> int:
    """The largest boundary up to `end` whose whole blocks are all found."""
    num_blocks = end // units_per_block
    for begin in range(0, num_blocks, _PIECE):
        stop = min(num_blocks, begin + _PIECE)
        last = digests[(begin + 1) * units_per_block - 1 : stop * units_per_block : units_per_block]
        gap = _presence(group, last).find(0)
        if gap >= 0:
            return (begin + gap + 1) * units_per_block - 1
    return end


def _pinned_reach(group: Collection[bytes], digests: Sequence[bytes], end: int, num_sink_blocks: int) -> int:
    """The largest boundary up to `end` whose pinned blocks are all found."""
    missing = _presence(group, digests[: min(end, num_sink_blocks)]).find(0)
    return end if missing < 0 else missing


def _largest_boundary(searches: list[_WindowSearch], at: int, floor: int) -> int:
    """The largest boundary in (floor, at] that is good in every group; `floor` if none is."""
    settled = False
    while not settled:
        before = at
        for search in searches:
            at = search.largest_boundary(at, floor)
        settled = at == before or len(searches) == 1
    return at


def _presence(group: Collection[bytes], digests: Sequence[bytes]) -> bytes:
    return bytes(map(group.__contains__, digests))


class _WindowSearch:
    """One sliding group: which boundaries have their live blocks, from `end` down; looks no further back than it must.

    Any monotone `live` works: a block missing at `i` rules out every boundary in `(i, u]`, since lower bounds grow with n.
    """

    def __init__(self, retention: Retention, group: Collection[bytes], digests: Sequence[bytes], end: int) -> None:
        self._first = retention.first_live_at(end)
        self._free = retention.free_boundaries(end)
        self._group, self._digests = group, digests
        self._present = bytearray(end)  # right from `_known` on
        self._known = end
        # boundaries above `_edge` need the `_run` blocks before them; windows are alike all along, other kinds need one or none
        self._run, self._edge = 1, 0
        if retention.spec.window > 1:
            self._run = -(-(retention.spec.window - 1) // retention.block_size)
            self._edge = retention.num_sink_blocks + self._run

    def largest_boundary(self, at: int, floor: int) -> int:
        """Largest good boundary in (floor, at], else `floor`."""
        while at > floor:
            first = self._first[at]
            self._look_back(first)
            missing = self._present.rfind(0, first, at)
            if missing < 0:
                return at
            at = max(self._behind_last_run(missing, floor), self._free[missing])
        return floor

    def _behind_last_run(self, end: int, floor: int) -> int:
        """No boundary that needs a block is good between this one, which may not be good itself, and `end`."""
        run, edge = (self._run, self._edge) if end > self._edge else (1, 0)
        lowest = max(floor, edge)
        present = b"\1" * run
        while (at := self._present.rfind(present, self._known, end)) < 0 and self._known > max(0, lowest - run):
            self._look_back(self._known - _PIECE)
        return max(at + run if at >= 0 else 0, lowest)

    def _look_back(self, begin: int) -> None:
        """Know all from `begin` on."""
        begin = max(0, begin)
        if begin < self._known:
            self._present[begin : self._known] = _presence(self._group, self._digests[begin : self._known])
            self._known = begin
