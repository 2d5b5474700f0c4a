"""`Histogram`: counts values in fixed buckets, cheaply enough to observe every block and every token."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Buckets(NamedTuple):
    """A histogram at one moment: `counts[i]` values were in `(bounds[i - 1], bounds[i]]`; the last count is of those above every
    bound."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


class Histogram:
    """Counts values by bucket, without a lock or a label look-up: one thread adds values, and any thread calls `buckets`."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or `count` equal values."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> Buckets:
        """Return the counts so far."""
        return Buckets(self._bounds, tuple(self._counts), self._sum)
