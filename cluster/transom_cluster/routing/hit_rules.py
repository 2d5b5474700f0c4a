"""`HitRules`: what a prefix hit needs in a cache of one shape, as arrays for the search of all workers at once.

The rule itself is `transom_core.kv_cache.prefix_search.find_hit`, which workers run; its docstring has the terms. In short: a hit
needs all blocks below it in *full groups*, the first blocks of *sliding groups* with sinks, and in every sliding group the *live*
blocks that the next token reads. Where the live blocks alone are missing, a *window repair* computes a bounded tail again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transom_cluster.routing.index_code import Integers
from transom_core.contract.kv_events import CacheShape
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.window_repair import repair_start

_EVERY_BLOCK = 1 << 40
_UNKNOWN = -1


class LeadingRule(NamedTuple):
    """The blocks of one group that a hit needs from the first one on."""

    group: int
    hash_blocks_per_block: int
    num_blocks: int  # needed; the others are needed by their boundaries alone
    num_followed: int = 0


class SharedRange(NamedTuple):
    """Blocks [begin, end) of one group, by worker; each has `step` hash blocks."""

    group: int
    step: int
    begin: Integers
    end: Integers


class HitRules:
    """The rules of one shape. Not thread-safe: its tables grow on use."""

    def __init__(self, shape: CacheShape, *, max_model_len: int) -> None:
        self.shape = shape
        self._retentions = [Retention(group) for group in shape.groups]
        self._sliding = [(i, one) for i, one in enumerate(self._retentions) if not one.keeps_everything]
        full = [(i, one) for i, one in enumerate(self._retentions) if one.keeps_everything]
        block_size = shape.block_size
        leading = [LeadingRule(i, one.block_size // block_size, _EVERY_BLOCK) for i, one in full]
        leading += [LeadingRule(i, 1, one.num_sink_blocks) for i, one in self._sliding if one.num_sink_blocks]
        self.leading = np.array(leading, np.int64).reshape(-1, len(LeadingRule._fields))
        self.sliding_groups = np.array([i for i, _ in self._sliding], np.int64)
        self._repairs = shape.window_repair and bool(full) and bool(self._sliding)
        self._first_live = np.zeros((len(self._sliding), 0), np.int64)
        self._repaired_from = np.zeros(0, np.int64)  # by boundary; computed when it is first needed
        # The tables are long; they are made now, so that the first long prompt does not wait for them.
        self._fit(max_model_len // block_size)

    def first_live(self, num_blocks: int) -> Integers:
        """[sliding groups, boundaries]: the first live block at boundaries 0 to at least `num_blocks`, sink blocks apart."""
        self._fit(num_blocks)
        return self._first_live

    def shared_ranges(self, boundaries: Integers, is_repaired: npt.NDArray[np.bool_]) -> list[SharedRange]:
        """The blocks that hits at these boundaries (in hash blocks) share with the cache, group by group.

        A hit whose windows are repaired shares only the sink blocks of sliding groups.
        """
        self._fit(int(boundaries.max()))
        none = np.zeros_like(boundaries)
        ranges = [
            SharedRange(group, step, none, boundaries // step)
            for group, step, num_blocks, _ in self.leading.tolist()
            if num_blocks == _EVERY_BLOCK
        ]
        for row, (group, retention) in enumerate(self._sliding):
            if retention.num_sink_blocks:
                ranges.append(SharedRange(group, 1, none, np.minimum(boundaries, retention.num_sink_blocks)))
            first = np.minimum(self._first_live[row, boundaries], boundaries)
            ranges.append(SharedRange(group, 1, np.where(is_repaired, boundaries, first), boundaries))
        return ranges

    def repaired_from(self, boundaries: Integers) -> Integers:
        """The hash blocks from which window repairs of these boundaries start; 0 where nothing is repaired."""
        if not self._repairs:
            return np.zeros_like(boundaries)
        self._fit(int(boundaries.max()))
        found = self._repaired_from[boundaries]
        if found.min() == _UNKNOWN:
            for boundary in set(boundaries[found == _UNKNOWN].tolist()):
                token = repair_start(self.shape.groups, boundary * self.shape.block_size)
                self._repaired_from[boundary] = token // self.shape.block_size
            found = self._repaired_from[boundaries]
        return found

    def live_blocks(self, boundary: int) -> list[int]:
        """For each group the number of blocks that a sequence needs to continue at a boundary (in hash blocks)."""
        self._fit(boundary)
        counts = [boundary * self.shape.block_size // one.block_size for one in self._retentions]
        for row, (group, retention) in enumerate(self._sliding):
            first = int(self._first_live[row, boundary])
            counts[group] = min(retention.num_sink_blocks, boundary) + max(0, boundary - first)
        return counts

    def _fit(self, num_blocks: int) -> None:
        """Extend the tables to boundary `num_blocks`."""
        num_boundaries = len(self._repaired_from)
        if num_boundaries > num_blocks:
            return
        num_blocks = max(num_blocks, 2 * num_boundaries)
        tables = [retention.first_live_at(num_blocks)[: num_blocks + 1] for _, retention in self._sliding]
        self._first_live = np.array(tables, np.int64).reshape(len(self._sliding), num_blocks + 1)
        unknown = np.full(num_blocks + 1 - num_boundaries, _UNKNOWN)
        self._repaired_from = np.concatenate([self._repaired_from, unknown])
