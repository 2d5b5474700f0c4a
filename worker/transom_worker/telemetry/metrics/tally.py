"""`Tally`: a histogram for the step loop. It needs neither lock nor label look-up: one thread adds values, and scrapes only
read."""

from __future__ import annotations

from bisect import bisect_left


class Tally:
    """`counts[i]` is the number of values in `(bounds[i - 1], bounds[i]]`; the last count is of those above every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
