"""A rank's place among the ranks that share one model, and its share of anything cut by whole units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank} of {self.size}; it must be from 0 to {self.size - 1}.")

    def share(self, units: int) -> slice:
        """This rank's [start, end) of `units` heads, columns or rows: contiguous, sizes differ by one at most."""
        return slice(self.rank * units // self.size, (self.rank + 1) * units // self.size)
