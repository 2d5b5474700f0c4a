"""How long one group's blocks lie in the cache before they are hit or evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transom_worker.kvcache.histogram import Histogram


class BlockTimes:
    """Two histograms over blocks: `residency` from cached to evicted, `reuse_interval` from cached to hit."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self.residency = Histogram()
        self.reuse_interval = Histogram()
        self._clock = clock
        self._since_s = [0.0] * num_blocks  # by block: when its last reference went

    def cached(self, blocks: Sequence[int]) -> None:
        """Nobody references these any more, and they can be hit."""
        if blocks:
            now_s, since_s = self._clock(), self._since_s
            for block in blocks:
                since_s[block] = now_s

    def hit(self, blocks: Sequence[int]) -> None:
        """These were cached until now."""
        if blocks:
            now_s = self._clock()
            for since_s in map(self._since_s.__getitem__, blocks):
                self.reuse_interval.observe(now_s - since_s)

    def since_s(self) -> list[float]:
        """By block, when its last reference went; 0 where none ever did. A copy."""
        return self._since_s.copy()

    def age_s(self, block: int) -> float:
        """How long ago its last reference went."""
        return self._clock() - self._since_s[block]

    def evicted(self, blocks: Sequence[int]) -> None:
        """These were cached until now."""
        now_s = self._clock()
        for since_s in map(self._since_s.__getitem__, blocks):
            self.residency.observe(now_s - since_s)
