"""`Capacity`: computes how much the KV pool can hold: the pages that one sequence needs at its peak, the longest sequence that
fits, and how many more sequences fit now.

A *page* is a part of the pool; it is leased to one KV cache group at a time and holds blocks of that group only. A sequence's
*peak* is the most blocks that it holds at once. Example: two groups with 4 and 8 blocks a page; a sequence that holds at most 10
and 9 blocks of them needs ceil(10 / 4) + ceil(9 / 8) = 5 pages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.allocator import BlockAllocator
from transom_worker.kvcache.blocks.arena import Arena


class Capacity:
    """Computes bounds by counting pages. They hold even if blocks are scattered over pages, since the cache can compact them.

    `retentions` are those of sequences without a KV policy; for a sequence with a policy, methods take its own.
    """

    def __init__(self, retentions: RetentionSet, arena: Arena, allocator: BlockAllocator) -> None:
        self._retentions = retentions
        self._arena = arena
        self._allocator = allocator

    def worst_case_pages(self, num_tokens: int, retentions: RetentionSet | None = None) -> int:
        """Return the pages that a sequence of `num_tokens` tokens needs at its peak."""
        computed = num_tokens - 1  # the last token is sampled, and no query reads its keys and values
        if computed <= 0:
            return 0
        return sum(
            -(-retention.peak_blocks(computed) // per_page)
            for retention, per_page in zip(retentions or self._retentions, self._arena.blocks_per_page, strict=True)
        )

    def longest_tokens(self, limit: int, retentions: RetentionSet | None = None) -> int:
        """Return the length in tokens, at most `limit`, of the longest sequence that fits the pool alone."""
        lengths = range(1, limit + 1)
        return bisect_right(lengths, self._arena.num_pages, key=lambda n: self.worst_case_pages(n, retentions))

    def num_that_fit(self, num_tokens: int) -> int:
        """Return how many more sequences of `num_tokens` tokens could run now, all at their peak at the same time.

        Cached blocks count as free, since they can be evicted. The sequences are assumed to share no block.
        """
        peaks = [retention.peak_blocks(max(1, num_tokens - 1)) for retention in self._retentions]
        max_blocks = (self._arena.num_pages * per_page for per_page in self._arena.blocks_per_page)
        most = min((count // max(1, peak) for count, peak in zip(max_blocks, peaks, strict=True)), default=0)

        def is_too_many(count: int) -> bool:
            return self._allocator.pages_needed([count * peak for peak in peaks]) is None

        return bisect_left(range(1, most + 1), True, key=is_too_many)
