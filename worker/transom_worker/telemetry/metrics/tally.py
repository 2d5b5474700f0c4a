"""A histogram for the hot path: no lock and no label look-up, since one thread feeds it and scrapes only read."""

from __future__ import annotations

from bisect import bisect_left


class Tally:
    """`counts[i]` values lie in `(bounds[i - 1], bounds[i]]`, the last ones above every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
