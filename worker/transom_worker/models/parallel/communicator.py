"""The interface of the ranks' collectives: all-reduce, gather and broadcast.

Every rank of a worker makes the same calls in the same order; a collective ends when all ranks have made the call.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """The collectives of one worker's ranks. Tensors may have any shape and any floating or integer dtype, contiguous or not.

    Every method raises `RankLost` when another rank has ended or is late; the communicator cannot be used after that.
    """

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by its sum over all ranks, bit for bit the same on every rank, and return `x`."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks, in order of rank, on the first rank, and None on the others.

        The tensors may differ in the size of their last axis only.
        """
        ...

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by the first rank's `x`, and return it."""
        ...

    def check(self) -> None:
        """Raise `RankLost` if a collective that was waited for has not come to its end, so that its result is no result.

        Waiting for a collective on a GPU orders the device's work, and returns before the other ranks have taken part.
        """
        ...

    def close(self) -> None:
        """Free the communicator's resources. Idempotent."""
        ...


class SingleRank:
    """The communicator of a worker with one rank: every collective returns its own tensor."""

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return a list that holds `x` alone."""
        return [x]

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def check(self) -> None:
        """Do nothing: no rank can be lost."""

    def close(self) -> None:
        """Do nothing."""


SINGLE_RANK = SingleRank()
