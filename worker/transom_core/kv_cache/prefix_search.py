"""Finds the longest cached prefix of a prompt that a sequence can start from. Workers run this code; a router's search over all
workers (`transom_cluster.routing.fleet_index`) is tested against it.

Terms:

    hash block      `--block-size` tokens; their *digest* names them and all tokens before them (`hashing`). A KV block spans one
                    hash block (several in groups of compressed entries) and is found under the digest of its last one
    boundary u      the position after the first `u` hash blocks of a prompt
    full groups     KV cache groups that keep every token; a hit needs all their blocks below the boundary
    sliding groups  groups with a window, chunk or compressor state; a hit needs their *live* blocks, which the next token reads
    sink blocks     a sliding group's first blocks, which hold attention sinks and never slide out; a hit needs them too
    window repair   computing the tokens before a boundary again, so that the sliding groups get their live blocks (`window_repair`)

Example, hash blocks of 16 tokens, one full group and one with a window of 33 tokens (2 live blocks), a prompt of 10 hash blocks:

    hash block      0 1 2 3 4 5 6 7 8 9
    full group      # # # # # # # # . .     8 leading blocks cached: the boundary is at most 8
    window group    . . # # . . # . . .

Boundary 4 is a hit: the window group has blocks 2 and 3. Boundaries 5 to 8 are not. A window repair of boundary 8 computes blocks 6
and 7 again (with one window layer), so `start` is token 96 = 6 * 16, and that leaves less to compute than the hit at boundary 4: it
wins.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from operator import or_

from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.window_repair import repair_start

_LOOKUP_BLOCKS = 512  # hash blocks that are looked up at once

Present = tuple[Container[bytes], ...]  # the digests that one group has cached: a container for each tier


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """Where a sequence starts: tokens `[0, start)` need no computing.

    Without a window repair `start` is the end of the first `num_hash_blocks` hash blocks. With a window repair it lies before that
    end: the sequence computes `[start, end)` again for its sliding groups, while the full groups already hold that range.
    """

    num_hash_blocks: int  # the boundary, in hash blocks
    start: int  # the first token to compute
    full_groups_reach: int  # leading hash blocks that the full groups hold; at least `num_hash_blocks`
    limit: int  # largest boundary that the prompt's length allows
    device_start: int = 0  # where the sequence would start without the host tier; `start` if nothing is loaded
    memory_start: int = 0  # where it would start without the disk tier; `start` if nothing is read
    num_loaded: tuple[int, ...] = ()  # by group: blocks to load from the host tier; empty if none
    num_read: tuple[int, ...] = ()  # by group: how many of these must first be read from the disk tier; empty if none

    def needs_repair(self, block_size: int) -> bool:
        """Return whether windows must be repaired; `block_size` is the size of a hash block in tokens."""
        return self.start < self.num_hash_blocks * block_size


def hit_limit(num_tokens: int, block_size: int) -> int:
    """Return the largest boundary that leaves at least one of `num_tokens` tokens to compute."""
    return max(0, num_tokens - 1) // block_size


def find_hit(
    retentions: Sequence[Retention],
    found: Sequence[Collection[bytes]],
    digests: Sequence[bytes],
    limit: int,
    *,
    window_repair: bool,
    host: Sequence[Collection[bytes]] | None = None,
    disk: Sequence[Collection[bytes]] | None = None,
    rates: LoadRates | None = None,
) -> PrefixHit:
    """Return the hit that leaves fewest tokens to compute, at a boundary of at most `limit`, if its loads are worth their time.

    `found[g]` has the digests of group `g`'s cached blocks on the device, `host[g]` those of its blocks in the host tier, and
    `disk[g]` those in the disk tier. With a host tier two hits compete: one on the device's blocks alone, and one on the blocks of
    device and host. The second is taken if, by `rates`, loading its blocks takes no longer than computing the tokens that it saves.
    The winner then competes in the same way with a hit on the blocks of all tiers, whose missing blocks are read from the disk and
    then loaded (`LoadRates.are_worth_reading`).

    A hash block is as large as the smallest block of all groups.
    """
    search = _HitSearch(retentions, digests, limit, window_repair)
    hit = search.in_memory(found, host, rates)
    if host is None or disk is None or rates is None or hit.start == hit.limit * search.block_size or not any(disk):
        return hit
    tiers: list[Present] = list(zip(found, host, disk, strict=True))
    with_reads = search.among(tiers)
    spared_tokens = with_reads.start - hit.start
    if not spared_tokens:
        return hit
    num_loaded = search.num_outside([(group,) for group in found], with_reads)
    num_read = search.num_outside([group[:2] for group in tiers], with_reads)
    more_ns = rates.load_ns(num_loaded) + rates.reading_ns(num_read)
    more_ns -= rates.load_ns(hit.num_loaded) if hit.num_loaded else 0
    if not rates.are_worth_reading(spared_tokens, more_ns=more_ns):
        return hit
    return replace(
        with_reads, device_start=hit.device_start, memory_start=hit.start, num_loaded=num_loaded, num_read=num_read
    )


def shared_digests(
    retention: Retention, digests: Sequence[bytes], hit: PrefixHit, *, block_size: int
) -> Sequence[bytes]:
    """Return the digests of the cached blocks that a hit gives to a group, in order: sink blocks first."""
    boundary = hit.num_hash_blocks
    if retention.keeps_everything:
        step = retention.block_size // block_size
        return digests[step - 1 : boundary : step]
    sinks = digests[: min(retention.num_sink_blocks, boundary)]
    if hit.needs_repair(block_size):
        return sinks
    return [*sinks, *digests[retention.first_live_block(hit.start) : boundary]]


def needed_blocks(
    retention: Retention, digests: Sequence[bytes], hit: PrefixHit, *, block_size: int, num_held: int = 0
) -> list[tuple[bytes, int]]:
    """Return, once for each block of `shared_digests`, its digest and its index in the sequence (its logical index); of groups that
    keep every token without the blocks of the first `num_held` hash blocks."""
    step = retention.block_size // block_size
    first = num_held // step if retention.keeps_everything else 0
    logical_of = {digest: index // step for index, digest in enumerate(digests[: hit.num_hash_blocks])}
    shared = shared_digests(retention, digests, hit, block_size=block_size)
    return [(digest, at) for digest in dict.fromkeys(shared) if (at := logical_of[digest]) >= first]


@dataclass(frozen=True, slots=True)
class _HitSearch:
    """The search for one prompt's hits, by the tiers whose blocks may be used."""

    retentions: Sequence[Retention]
    digests: Sequence[bytes]
    limit: int
    window_repair: bool

    @property
    def block_size(self) -> int:
        """The tokens of a hash block."""
        return min(retention.block_size for retention in self.retentions)

    def in_memory(
        self, found: Sequence[Collection[bytes]], host: Sequence[Collection[bytes]] | None, rates: LoadRates | None
    ) -> PrefixHit:
        """Return the hit on the device's blocks or, if loading costs less than computing, on those of device and host."""
        present: list[Present] = [(group,) for group in found]
        hit = self.among(present)
        if host is None or rates is None or hit.start == hit.limit * self.block_size or not any(host):
            return hit
        with_loads = self.among(list(zip(found, host, strict=True)))
        num_loaded = self.num_outside(present, with_loads)
        spared_tokens = with_loads.start - hit.start
        if spared_tokens and spared_tokens * rates.token_ns >= rates.load_ns(num_loaded):
            return replace(with_loads, device_start=hit.start, num_loaded=num_loaded if any(num_loaded) else ())
        return replace(hit, full_groups_reach=with_loads.full_groups_reach)

    def num_outside(self, tiers: Sequence[Present], hit: PrefixHit) -> tuple[int, ...]:
        """Return, by group, how many blocks of a hit are in none of these tiers."""
        return tuple(
            _presence(group, shared_digests(retention, self.digests, hit, block_size=self.block_size)).count(0)
            for retention, group in zip(self.retentions, tiers, strict=True)
        )

    def among(self, found: Sequence[Present]) -> PrefixHit:
        """Return the hit that leaves fewest tokens to compute, with blocks of any of the tiers in `found`.

        Two boundaries compete:

        - the largest boundary at which every group has the blocks that it needs;
        - with a window repair, the largest boundary below which the full groups have all their blocks and every sink block exists.

        The second wins even if both leave the same number of tokens to compute, because it shares more blocks. No other boundary
        can win: the repair of a larger boundary never starts earlier than that of a smaller one. A repair that starts at token 0
        saves nothing and is not taken.
        """
        digests, block_size = self.digests, self.block_size
        limit = min(self.limit, len(digests))

        # `full_groups_reach`: the largest boundary below which the full groups have all blocks. `reach`: and all sink blocks.
        full_groups_reach, repairable = limit, False
        sliding: list[tuple[Retention, Present]] = []
        for retention, group in zip(self.retentions, found, strict=True):
            if retention.keeps_everything:
                step = retention.block_size // block_size
                full_groups_reach = _leading_boundary(group, digests, full_groups_reach, step)
                repairable = self.window_repair
            else:
                sliding.append((retention, group))
        reach = full_groups_reach
        for retention, group in sliding:
            reach = min(reach, _sink_boundary(group, digests, reach, retention.num_sink_blocks))

        # The largest boundary with all live blocks. If none lies above `repaired_from`, the repair of boundary `reach` wins.
        specs = [retention.spec for retention in self.retentions]
        repaired_from = repair_start(specs, reach * block_size) // block_size if repairable else 0
        searches = [_WindowSearch(retention, group, digests, reach) for retention, group in sliding]
        start = _largest_boundary(searches, reach, floor=repaired_from)
        takes_repair = start == repaired_from > 0
        return PrefixHit(
            num_hash_blocks=reach if takes_repair else start,
            start=start * block_size,
            full_groups_reach=full_groups_reach,
            limit=limit,
            device_start=start * block_size,
            memory_start=start * block_size,
        )


def _leading_boundary(group: Present, digests: Sequence[bytes], end: int, hash_blocks_per_block: int) -> int:
    """Return the largest boundary up to `end` for which the group has every block that lies wholly below it."""
    num_blocks = end // hash_blocks_per_block
    for begin in range(0, num_blocks, _LOOKUP_BLOCKS):
        stop = min(num_blocks, begin + _LOOKUP_BLOCKS)
        last = digests[(begin + 1) * hash_blocks_per_block - 1 : stop * hash_blocks_per_block : hash_blocks_per_block]
        gap = _presence(group, last).find(0)
        if gap >= 0:
            return (begin + gap + 1) * hash_blocks_per_block - 1
    return end


def _sink_boundary(group: Present, digests: Sequence[bytes], end: int, num_sink_blocks: int) -> int:
    """Return the largest boundary up to `end` below which no sink block is missing."""
    missing = _presence(group, digests[: min(end, num_sink_blocks)]).find(0)
    return end if missing < 0 else missing


def _largest_boundary(searches: list[_WindowSearch], at: int, floor: int) -> int:
    """Return the largest boundary in (floor, at] at which every sliding group has its live blocks; `floor` if there is none."""
    settled = False
    while not settled:
        before = at
        for search in searches:
            at = search.largest_boundary(at, floor)
        settled = at == before or len(searches) == 1
    return at


def _presence(group: Present, digests: Sequence[bytes]) -> bytes:
    """Return a byte per digest: 1 if the group has its block in any tier, else 0."""
    present = bytes(map(group[0].__contains__, digests))
    for tier in group[1:]:
        if 0 in present:
            present = bytes(map(or_, present, map(tier.__contains__, digests)))
    return present


class _WindowSearch:
    """Searches one sliding group, from `end` down, for boundaries that have their live blocks, and looks up no more blocks than it
    must.

    The search assumes that at a later boundary the live range starts at the same block or a later one. So if boundary `b` needs
    block `i`, every boundary from `i + 1` to `b` needs it. Example: boundary 20 needs blocks 12 to 19, and block 15 is missing:
    boundaries 16 to 20 are no hits, and the search continues at boundary 15 or below.
    """

    def __init__(self, retention: Retention, group: Present, digests: Sequence[bytes], end: int) -> None:
        self._retention = retention
        self._group, self._digests = group, digests
        self._present = bytearray(end)  # by block: 1 if found; looked up from `_known_from` on
        self._known_from = end
        # A window needs `_num_live` blocks at every boundary above `_steady_from`. Below it, and in groups of other kinds, the
        # number varies: a boundary needs no block, or at least the one before it.
        self._num_live, self._steady_from = 1, 0
        if retention.spec.window > 1:
            self._num_live = -(-(retention.spec.window - 1) // retention.block_size)
            self._steady_from = retention.num_sink_blocks + self._num_live

    def largest_boundary(self, at: int, floor: int) -> int:
        """Return the largest boundary in (floor, at] at which this group has its live blocks; `floor` if there is none."""
        while at > floor:
            first = self._retention.first_live_block(at * self._retention.block_size)
            self._look_back(first)
            missing = self._present.rfind(0, first, at)
            if missing < 0:
                return at
            at = max(self._after_last_run(missing, floor), self._retention.largest_free_boundary(missing))
        return floor

    def _after_last_run(self, end: int, floor: int) -> int:
        """Return the next boundary to try. Every boundary above it, up to `end`, lacks a live block or needs none.

        The returned boundary may lack one, too. It may be `end` itself.
        """
        num_live, steady_from = (self._num_live, self._steady_from) if end > self._steady_from else (1, 0)
        lowest = max(floor, steady_from)
        run = b"\1" * num_live
        while (at := self._present.rfind(run, self._known_from, end)) < 0:
            if self._known_from <= max(0, lowest - num_live):
                break
            self._look_back(self._known_from - _LOOKUP_BLOCKS)
        return max(at + num_live if at >= 0 else 0, lowest)

    def _look_back(self, begin: int) -> None:
        """Look up all blocks from index `begin` on that are not known yet."""
        begin = max(0, begin)
        if begin < self._known_from:
            self._present[begin : self._known_from] = _presence(self._group, self._digests[begin : self._known_from])
            self._known_from = begin
