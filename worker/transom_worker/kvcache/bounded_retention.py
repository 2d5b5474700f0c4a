"""`BoundedRetention`: a group of a sequence whose KV policy chooses, while it runs, which blocks it keeps, up to a bound.

The scheduler applies the policy and removes blocks (`KvCache.remove`).

Nothing is freed by position alone, so to the cache the group keeps everything; the bound is what admission counts. Blocks of
such a sequence are never published.
"""

from __future__ import annotations

from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.retention import Retention


class BoundedRetention(Retention):
    """A full group of which a sequence holds at most `max_blocks` blocks at once, the first `num_sink_blocks` always."""

    def __init__(self, spec: GroupSpec, *, num_sink_blocks: int, max_blocks: int) -> None:
        super().__init__(spec)
        self.num_sink_blocks = num_sink_blocks
        self.max_blocks = max_blocks

    def first_live_block(self, n: int) -> int:
        """Return the run's first block: the one after the sink blocks, which only the policy may remove."""
        return self.num_sink_blocks

    def allocated_blocks(self, n: int, *, lag: int = 0) -> int:
        """Return the most blocks that a sequence may hold while token `n` is computed."""
        return min(n // self.block_size + 1, self.max_blocks)

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens may hold at once."""
        return min(max(0, num_tokens - 1) // self.block_size + 1, self.max_blocks)
