"""What ranks do together: add tensors up, gather them, pass one on. Every rank makes the same calls in the same order."""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """The ranks of one worker. Tensors may be of any shape and floating or integer dtype, contiguous or not.

    Every method may raise `RankLost` when a peer is gone or does not come in time; the communicator is useless from then on.
    """

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; the same bits on every rank. Returns `x`."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """On the first rank every rank's tensor in order of rank, on others None. Sizes may differ in the last axis alone."""
        ...

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x` on every rank, in place. Returns `x`."""
        ...

    def close(self) -> None:
        """Free what it holds; idempotent."""
        ...


class SingleRank:
    """One rank: nothing to do."""

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """`x` alone."""
        return [x]

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def close(self) -> None:
        """Nothing."""


SINGLE_RANK = SingleRank()
