"""A histogram of seconds in fixed buckets: cheap enough to feed for every block, frozen whole for whoever reports it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramStats:
    """`counts[i]` observations lie in `(bounds_s[i - 1], bounds_s[i]]`, the last ones above every bound."""

    bounds_s: tuple[float, ...] = BOUNDS_S
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0


class Histogram:
    """Counts of times, by bucket. Not thread-safe; `stats()` may go to any thread."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """`count` things took `value_s` each."""
        self._counts[bisect_left(BOUNDS_S, value_s)] += count
        self._sum_s += value_s * count

    def stats(self) -> HistogramStats:
        """All that was observed so far."""
        return HistogramStats(counts=tuple(self._counts), sum_s=self._sum_s)
