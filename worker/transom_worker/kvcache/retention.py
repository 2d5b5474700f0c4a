"""What `GroupSpec.live` means in blocks: the first block of the run that must stay, by processed tokens.

A sequence's table is its pinned blocks, then a run of consecutive logical blocks; `live` only ever drops the run's front. Tables
over unit boundaries are filled once per group and shared by every search and bound.
"""

from __future__ import annotations

import math

from transom_worker.kvcache.groups import GroupSpec


class Retention:
    """One group's live blocks. Not thread-safe: its tables grow on use."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.num_sink_blocks = spec.num_sink_blocks
        self.keeps_everything = spec.keeps_everything
        # tokens after which what is held repeats, once the first `reach` tokens are past
        self.period = math.lcm(spec.block_size, spec.chunk or 1, spec.ratio or 1)
        reach = spec.sinks + spec.window + (1 + spec.overlap) * spec.ratio
        self._steady_units = -(-(reach + self.period) // spec.block_size) + 1
        self._first = [self.first_live_block(0)]
        self._free_boundary = [0]
        self._peak = [1]  # by unit boundary, where most is held: a block more is needed, and none has come free since
        self._change: list[int] = []  # by unit: where inside it the first live block grows, else its end

    def first_live_block(self, n: int) -> int:
        """First logical block of the run that must stay after `n` processed tokens; at least `num_sink_blocks`."""
        if self.keeps_everything:
            return 0
        ranges = self.spec.live(n)
        begin = ranges[-1][0] if ranges and ranges[-1][1] == n else n
        return max(self.num_sink_blocks, begin // self.block_size)

    def next_change(self, n: int) -> int:
        """Smallest m > n, up to the next unit boundary, at which more may be freed than at `n`; that boundary if none."""
        unit = n // self.block_size
        self._grow(unit + 1)
        change = self._change[unit]
        return change if change > n else (unit + 1) * self.block_size

    def first_live_at(self, units: int) -> list[int]:
        """Table over boundaries 0 ... at least `units`: the run's first live block at that boundary."""
        self._grow(units)
        return self._first

    def free_boundaries(self, units: int) -> list[int]:
        """Table likewise: the largest boundary up to that one at which no block of the run must be present (0 always is)."""
        self._grow(units)
        return self._free_boundary

    def allocated_blocks(self, n: int, *, lag: int = 0) -> int:
        """Blocks that a sequence holds while token `n` is computed, those before it processed but for the last `lag`."""
        last = n // self.block_size
        first = self.first_live_block(max(0, n - lag))
        return min(self.num_sink_blocks, last + 1) + max(0, last + 1 - max(first, self.num_sink_blocks))

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds at once, one token computed per step."""
        units = max(0, num_tokens - 1) // self.block_size
        if self.keeps_everything:
            return units + 1
        units = min(units, self._steady_units)
        self._grow(units)
        return self._peak[units]

    def _grow(self, units: int) -> None:
        for unit in range(len(self._first), units + 1):
            first = self.first_live_block(unit * self.block_size)
            self._first.append(first)
            self._free_boundary.append(unit if first >= unit else self._free_boundary[-1])
            self._peak.append(max(self._peak[-1], self.allocated_blocks(unit * self.block_size)))
            self._change.append(self._change_inside((unit - 1) * self.block_size, unit * self.block_size))

    def _change_inside(self, begin: int, end: int) -> int:
        before = self.first_live_block(begin)
        low, high = begin + 1, end
        while low < high:
            middle = (low + high) // 2
            if self.first_live_block(middle) > before:
                high = middle
            else:
                low = middle + 1
        return low
