"""How much of the leased memory holds no block while a replay runs."""

from __future__ import annotations

from transom_worker.kvcache.stats import CacheStats


class FragmentationMeter:
    """The mean, over samples, of the share of leased bytes without a block: empty blocks and what geometry leaves at page ends."""

    def __init__(self) -> None:
        self._total = 0.0
        self._count = 0

    def sample(self, stats: CacheStats) -> None:
        """Look at the pages now."""
        leased_bytes = (stats.num_pages - stats.free_pages) * stats.page_bytes
        used_bytes = sum((group.active_blocks + group.cached_blocks) * group.block_bytes for group in stats.groups)
        if leased_bytes:
            self._total += 1 - used_bytes / leased_bytes
            self._count += 1

    @property
    def mean(self) -> float:
        """0 without samples."""
        return self._total / self._count if self._count else 0.0
