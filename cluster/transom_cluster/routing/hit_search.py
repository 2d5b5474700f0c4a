"""`HitSearch`: finds the prefix hits of one prompt on many workers in one walk, by the rules of their caches (`HitRules`).

The rule itself is `transom_core.kv_cache.prefix_search.find_hit`, which workers run; its docstring defines the terms. In short: a
hit needs all blocks before its end in *full groups*, the first blocks of *sliding groups* with sinks, and in every sliding group
the *live* blocks that the next token reads. If only live blocks are missing, a *window repair* computes a bounded tail again.

- **workers**: a set of workers as one Python int, which has the bit of each worker's device number set (`index_code`: holders). So
  one `&` handles all workers.
- **segment**: the hash blocks that are hashed and looked up at once: the first 128, those up to 256, those up to 512, then 512 each
  time. A prompt that no worker has is not hashed to its end.
- **run**: consecutive blocks that the same workers have. The walk takes one step per run, not one per block.

For example, workers A and B have blocks 0 to 99 of a full group, and only A has 100 to 149. These are two runs: at the second one
only A is left, and B's reach is 100. No worker has block 150, so A's reach is 150.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from transom_cluster.routing.prefix_table import PrefixTable, Run
from transom_cluster.routing.prompt_hashes import PromptChain
from transom_core.contract.kv_events import CacheShape
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.window_repair import repair_start

MAX_REPAIRS = 65_536  # cached starts of window repairs, of some 100 bytes each
_EVERY_BLOCK = 1 << 40  # more blocks than any prompt has
_SEGMENT_ENDS = [128, 256, *range(512, 1 << 21, 512)]  # more than any prompt has


class LeadingRule(NamedTuple):
    """One group's blocks that a hit needs without a gap from the first block on."""

    group: int
    hash_blocks_per_block: int
    num_blocks: int  # the hit needs these, as far as they are before its end


class SharedRange(NamedTuple):
    """Blocks [begin, end) of one group."""

    group: int
    hash_blocks_per_block: int
    begin: int
    end: int


class HitRules:
    """The rules of one shape. A boundary, the end of a possible hit, counts hash blocks. Not thread-safe: it caches repairs."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        retentions = [Retention(group) for group in shape.groups]
        full = [(i, one) for i, one in enumerate(retentions) if one.keeps_everything]
        self.sliding = [(i, one) for i, one in enumerate(retentions) if not one.keeps_everything]
        self._full = [(i, one.block_size // shape.block_size) for i, one in full]
        self.leading = [LeadingRule(i, step, _EVERY_BLOCK) for i, step in self._full]
        self.leading += [LeadingRule(i, 1, one.num_sink_blocks) for i, one in self.sliding if one.num_sink_blocks]
        self._repairs = shape.window_repair and bool(full) and bool(self.sliding)
        self._repaired_from: dict[int, int] = {}  # boundary -> the hash block at which its repair starts

    def shared_ranges(self, boundary: int, *, is_repaired: bool) -> Iterator[SharedRange]:
        """Yield the blocks that a hit shares with the cache. If its windows are repaired, sliding groups share only sink blocks."""
        for group, step in self._full:
            yield SharedRange(group, step, 0, boundary // step)
        for group, retention in self.sliding:
            yield SharedRange(group, 1, 0, min(retention.num_sink_blocks, boundary))
            if not is_repaired:
                first = retention.first_live_block(boundary * retention.block_size)
                yield SharedRange(group, 1, min(first, boundary), boundary)

    def repaired_from(self, boundary: int) -> int:
        """Return the hash block at which the window repair for a boundary starts; 0 if the cache has no window repair."""
        if not self._repairs:
            return 0
        found = self._repaired_from.get(boundary)
        if found is None:
            token = repair_start(self.shape.groups, boundary * self.shape.block_size)
            if len(self._repaired_from) >= MAX_REPAIRS:
                self._repaired_from.clear()
            found = self._repaired_from[boundary] = token // self.shape.block_size
        return found

    def live_blocks(self, boundary: int) -> list[int]:
        """Return for each group the number of blocks that a sequence needs to continue at a boundary."""
        counts = [0] * len(self.shape.groups)
        for group, _, begin, end in self.shared_ranges(boundary, is_repaired=False):
            counts[group] += end - begin
        return counts


class Found(NamedTuple):
    """The first hash block that a worker must compute, and the boundary of its hit, which is larger if windows are repaired."""

    start: int
    boundary: int


class HitSearch:
    """The search of one prompt on workers with caches of one shape. Boundaries count hash blocks, up to `limit`."""

    def __init__(self, table: PrefixTable, rules: HitRules, prompt: PromptChain, limit: int) -> None:
        self._table, self._rules, self._prompt, self._limit = table, rules, prompt, limit
        # (group, hash blocks per block, segment) -> the segment's runs
        self._segments: dict[tuple[int, int, int], list[Run]] = {}

    def find(self, workers: int, *, tiers: int) -> dict[int, Found]:
        """Return the hits on the workers' first `tiers` tiers, by holder."""
        found = {}
        for reach, those in self._reaches(workers, tiers).items():
            floor = self._rules.repaired_from(reach)
            for start, these in self._starts(reach, floor, those, tiers):
                # At the floor, a window repair computes the tokens from there to `reach`, so `reach` stays the hit's boundary.
                hit = Found(start, reach if start == floor > 0 else start)
                found.update(dict.fromkeys(_holders(these), hit))
        return found

    def num_missing(self, holder: int, found: Found, *, tiers: int) -> list[int]:
        """Return for each group how many blocks of a hit are in none of a worker's first `tiers` tiers."""
        counts = [0] * len(self._rules.shape.groups)
        of_worker = ((1 << tiers) - 1) << holder
        is_repaired = found.start < found.boundary
        for group, step, first, stop in self._rules.shared_ranges(found.boundary, is_repaired=is_repaired):
            counts[group] += sum(
                min(stop, end) - max(first, begin)
                for begin, end, holders in self._backwards(group, step, first, stop)
                if not holders & of_worker
            )
        return counts

    def _reaches(self, workers: int, tiers: int) -> dict[int, int]:
        """Return the workers by their *reach*, which is the largest boundary for which they have all leading blocks."""
        failed = []
        alive, segment, begin = workers, 0, 0
        while alive and begin < self._limit:
            have_all = alive
            for group, step, num_blocks in self._rules.leading:
                last = min(num_blocks, self._limit // step)
                left = alive
                for run in self._runs(group, step, segment) if begin // step < last else ():
                    gone = left & ~_devices(run.holders, tiers)
                    if gone and run.begin < last:
                        # The largest boundary that does not need block `run.begin`: one hash block before the block's end.
                        failed.append(((run.begin + 1) * step - 1, gone))
                        left ^= gone
                have_all &= left
            alive, begin, segment = have_all, _SEGMENT_ENDS[segment], segment + 1
        reaches = {self._limit: alive} if alive else {}
        for reach, gone in sorted(failed):  # a worker that failed under several rules has the smallest reach
            if gone & workers:
                reaches[reach] = reaches.get(reach, 0) | gone & workers
            workers &= ~gone
        return reaches

    def _starts(self, reach: int, floor: int, workers: int, tiers: int) -> Iterator[tuple[int, int]]:
        """Yield pairs (boundary, workers): for each worker the largest boundary in (floor, reach] at which it has the live blocks
        of all sliding groups, or `floor` if there is none.

        At a boundary b, a worker fails in a group if it lacks a block i in [first live block at b, b). It then fails at every
        boundary in (i, b]: a smaller boundary never has a later first live block, so block i is live there, too. If the worker
        lacks the whole run that ends with i, it also fails at the boundaries inside the run, unless one of them needs no block at
        all.
        """
        waiting = {reach: workers}  # the next boundary to try -> workers
        while waiting:
            boundary = max(waiting)
            here = waiting.pop(boundary)
            if boundary <= floor:
                yield floor, here
                continue
            for group, retention in self._rules.sliding:
                first = retention.first_live_block(boundary * retention.block_size)
                for run in self._backwards(group, 1, first, boundary) if here else ():
                    missing = here & ~_devices(run.holders, tiers)
                    if missing:
                        next_boundary = max(run.begin, retention.largest_free_boundary(min(run.end, boundary) - 1))
                        waiting[next_boundary] = waiting.get(next_boundary, 0) | missing
                        here ^= missing
            if here:
                yield boundary, here

    def _backwards(self, group: int, step: int, first: int, stop: int) -> Iterator[Run]:
        """Yield the runs that have blocks in [first, stop), the last one first. A run may extend beyond `first` and `stop`."""
        while first < stop:
            runs = self._runs(group, step, bisect_left(_SEGMENT_ENDS, stop * step))
            for at in range(bisect_left(runs, stop, key=lambda run: run.begin) - 1, -1, -1):
                if runs[at].end <= first:
                    return
                yield runs[at]
            stop = runs[0].begin

    def _runs(self, group: int, step: int, segment: int) -> list[Run]:
        """Return the runs of the blocks whose last hash block is in a segment."""
        runs = self._segments.get((group, step, segment))
        if runs is None:
            begin = _SEGMENT_ENDS[segment - 1] // step if segment else 0
            end = min(_SEGMENT_ENDS[segment], self._prompt.num_blocks) // step
            runs = self._table.find_runs(self._prompt.hashed(end * step), group, step, begin, end)
            self._segments[group, step, segment] = runs
        return runs


def _devices(holders: int, tiers: int) -> int:
    """Set each worker's device bit if any of its first `tiers` tiers has its bit set. The other bits of the result mean nothing."""
    for tier in range(1, tiers):
        holders |= holders >> tier
    return holders


def _holders(workers: int) -> Iterator[int]:
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
