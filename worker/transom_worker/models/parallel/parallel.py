"""A rank's place among the ranks that share one model."""

from __future__ import annotations

from dataclasses import dataclass, field

from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Rank `rank` of `size` ranks, with the communicator that connects it to the others."""

    rank: int = 0
    size: int = 1
    comm: Communicator = field(default=SINGLE_RANK, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank} of {self.size}; it must be from 0 to {self.size - 1}.")

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which samples tokens and reports results."""
        return self.rank == 0
