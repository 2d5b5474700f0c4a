"""`Retention`: which blocks of a KV cache group a sequence must keep after a number of tokens.

Terms:

    logical block  a block's index in its sequence: with blocks of 16 tokens, logical block 3 has tokens 48 to 63
    live tokens    the tokens that the next token's query reads in this group (`GroupSpec.live`)
    live blocks    the blocks that have live tokens; the sequence must keep them
    sink blocks    the first logical blocks of a group with attention sinks; they never slide out
    run            the consecutive logical blocks after the sink blocks; blocks are only ever freed at its front
    boundary b     the position after the first `b` blocks of a sequence

Example, a window of 33 tokens (the query included), blocks of 16:

    processed tokens    live tokens     first live block
    40                  [8, 40)         0
    47                  [15, 47)        0
    48                  [16, 48)        1: block 0 may be freed

Tables by boundary are computed once per group; prefix searches and capacity bounds look values up in them.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from transom_core.kv_cache.groups import GroupSpec


class Retention:
    """One group's live blocks. Not thread-safe: its tables grow on use."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.num_sink_blocks = spec.num_sink_blocks
        self.keeps_everything = spec.keeps_everything
        # From `reach` processed tokens on, the live blocks after `n + period` tokens are those after `n` tokens, shifted.
        self.period = math.lcm(spec.block_size, spec.chunk or 1, spec.ratio or 1)
        reach = spec.sinks + spec.window + (1 + spec.overlap) * spec.ratio
        self._steady_blocks = -(-(reach + self.period) // spec.block_size) + 1
        self._first_live = [self.first_live_block(0)]  # by boundary
        self._free_boundary = [0]  # by boundary: the largest boundary, up to this one, without live blocks in the run
        self._peak = [1]  # by boundary: most blocks that a sequence holds at once up to there
        # By block: the position inside it at which the first live block grows, else its end.
        self._change: list[int] = []

    def first_live_block(self, n: int) -> int:
        """Return the first logical block of the run that must stay after `n` processed tokens; at least `num_sink_blocks`."""
        return 0 if self.keeps_everything else self.spec.first_live_block(n)

    def next_change(self, n: int) -> int:
        """Return the smallest m > n at which more blocks may be freed than at `n`; at most the next boundary between blocks."""
        block = n // self.block_size
        self._grow(block + 1)
        change = self._change[block]
        return change if change > n else (block + 1) * self.block_size

    def first_live_at(self, num_blocks: int) -> list[int]:
        """Return a table over boundaries 0 to at least `num_blocks`: the run's first live block at that boundary."""
        self._grow(num_blocks)
        return self._first_live

    def boundaries_without_live_blocks(self, num_blocks: int) -> list[int]:
        """Return a table over boundaries 0 to at least `num_blocks`: the largest boundary, up to that one, that needs no block of
        the run.

        Boundary 0 needs none. Example: with chunked attention a sequence at the start of a chunk needs no block.
        """
        self._grow(num_blocks)
        return self._free_boundary

    def allocated_blocks(self, n: int, *, lag: int = 0) -> int:
        """Return the blocks that a sequence holds while token `n` is computed, and the last `lag` tokens before it are in
        flight.
        """
        last = n // self.block_size
        first = self.first_live_block(max(0, n - lag))
        return min(self.num_sink_blocks, last + 1) + max(0, last + 1 - max(first, self.num_sink_blocks))

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at once, if each step computes one token."""
        last = max(0, num_tokens - 1) // self.block_size
        if self.keeps_everything:
            return last + 1
        last = min(last, self._steady_blocks)
        self._grow(last)
        return self._peak[last]

    def _grow(self, num_blocks: int) -> None:
        """Extend the tables up to boundary `num_blocks`."""
        for boundary in range(len(self._first_live), num_blocks + 1):
            first = self.first_live_block(boundary * self.block_size)
            self._first_live.append(first)
            self._free_boundary.append(boundary if first >= boundary else self._free_boundary[-1])
            self._peak.append(max(self._peak[-1], self.allocated_blocks(boundary * self.block_size)))
            self._change.append(self._change_inside((boundary - 1) * self.block_size, boundary * self.block_size))

    def _change_inside(self, begin: int, end: int) -> int:
        """Return the position in (begin, end] at which the first live block grows, else `end`."""
        inside = range(begin + 1, end)
        return begin + 1 + bisect_right(inside, self.first_live_block(begin), key=self.first_live_block)
