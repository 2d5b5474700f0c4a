"""`HitRules`: which blocks a prefix hit needs in a cache of one shape.

The rule itself is `transom_core.kv_cache.prefix_search.find_hit`, which workers run; its docstring defines the terms. In short: a
hit needs all blocks before its end in *full groups*, the first blocks of *sliding groups* with sinks, and in every sliding group
the *live* blocks that the next token reads. If only live blocks are missing, a *window repair* computes a bounded tail again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from transom_core.contract.kv_events import CacheShape
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.window_repair import repair_start

MAX_REPAIRS = 65_536  # cached starts of window repairs, of some 100 bytes each
_EVERY_BLOCK = 1 << 40  # more blocks than any prompt has


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
