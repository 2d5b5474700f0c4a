"""How many more sequences there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from transom_worker.kvcache.allocator import BlockAllocator
from transom_worker.kvcache.arena import Arena


def num_that_fit(peak_blocks: Sequence[int], arena: Arena, allocator: BlockAllocator) -> int:
    """Sequences that hold so many blocks of each group, in what is free or evictable now; none shares a block with another."""
    slots = (arena.num_pages * per_page for per_page in arena.blocks_per_page)
    low, high = 0, min((count // max(1, peak) for count, peak in zip(slots, peak_blocks, strict=True)), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if allocator.pages_needed([middle * peak for peak in peak_blocks]) is not None:
            low = middle
        else:
            high = middle - 1
    return low
