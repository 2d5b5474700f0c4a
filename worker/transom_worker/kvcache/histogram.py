"""`Histogram`: counts times in fixed buckets, cheaply enough to observe every block; `HistogramStats` is a frozen copy for
metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramStats:
    """`counts[i]` observations were in `(bounds_s[i - 1], bounds_s[i]]`; the last count is of those above every bound."""

    bounds_s: tuple[float, ...] = BOUNDS_S
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0


class Histogram:
    """Counts times by bucket. Not thread-safe; the result of `stats()` may be used on any thread."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """Add `count` observations of `value_s`."""
        self._counts[bisect_left(BOUNDS_S, value_s)] += count
        self._sum_s += value_s * count

    def stats(self) -> HistogramStats:
        """Return a copy of the counts."""
        return HistogramStats(counts=tuple(self._counts), sum_s=self._sum_s)
