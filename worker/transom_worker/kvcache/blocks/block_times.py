"""`BlockTimes`: measures how long one group's blocks stay in the prefix cache before they are hit or evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transom_worker.kvcache.histogram import Histogram


class BlockTimes:
    """Two histograms over blocks: `residency` from cached to evicted, `reuse_interval` from cached to hit.

    A published block is cached from the moment when the last running sequence stops using it. Example: if that happens at second
    10, and a sequence hits the block at second 13, the reuse interval is 3 s. `clock` gives seconds.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self.residency = Histogram()
        self.reuse_interval = Histogram()
        self._clock = clock
        self._since_s = [0.0] * num_blocks  # by block: when its last reference was removed

    def cached(self, blocks: Sequence[int]) -> None:
        """Note that these blocks lost their last references just now and can be hit."""
        if blocks:
            now_s, since_s = self._clock(), self._since_s
            for block in blocks:
                since_s[block] = now_s

    def hit(self, blocks: Sequence[int]) -> None:
        """Note that sequences hit these blocks, which were cached until now."""
        if blocks:
            now_s = self._clock()
            for since_s in map(self._since_s.__getitem__, blocks):
                self.reuse_interval.observe(now_s - since_s)

    def since_s(self) -> list[float]:
        """Return a copy of the times at which blocks lost their last reference, by block; 0 if that never happened."""
        return self._since_s.copy()

    def age_s(self, block: int) -> float:
        """Return how long ago a block's last reference was removed."""
        return self._clock() - self._since_s[block]

    def evicted(self, blocks: Sequence[int]) -> None:
        """Note that these blocks were evicted just now."""
        now_s = self._clock()
        for since_s in map(self._since_s.__getitem__, blocks):
            self.residency.observe(now_s - since_s)
