"""A rank's place among the ranks that share one model, and the interface of their collectives: all-reduce, gather and broadcast.

Every rank of a worker makes the same calls in the same order; a collective completes once all ranks have called it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from transom_kernels.cpu.recording import host_call


class Communicator(ABC):
    """The collectives of one worker's ranks. Tensors may have any shape and any floating or integer dtype, contiguous or not.

    Every method raises `RankLost` if another rank has ended or exceeds the timeout; the communicator cannot be used after that.
    Replays of a recorded program of CPU kernels call `all_reduce_` and `broadcast_` again on the same tensors.
    """

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by its sum over all ranks, bit for bit the same on every rank, and return `x`."""
        host_call(lambda: _on_contiguous(self._all_reduce, x))
        return x

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by rank 0's `x`, and return it."""
        host_call(lambda: _on_contiguous(self._broadcast, x))
        return x

    @abstractmethod
    def gather(self, x: torch.Tensor, *, fixed_widths: bool = False) -> list[torch.Tensor] | None:
        """On rank 0, return the tensors of all ranks in order of rank; return None on the others.

        The tensors may differ only in the size of their last axis. With `fixed_widths`, these sizes are those of every other such
        call, so that ranks exchange them once, and later calls do not make the host wait for a GPU.
        """

    @property
    @abstractmethod
    def can_capture(self) -> bool:
        """Return whether a CUDA graph may contain `all_reduce_` and `broadcast_`."""

    @abstractmethod
    def end_step(self) -> None:
        """Note that all collectives of a step have been launched. If the device does not complete them, `check` will raise."""

    @abstractmethod
    def check(self) -> None:
        """Raise `RankLost` if an earlier collective was aborted before it completed, so that its result is invalid.

        On a GPU a collective's method returns before the other ranks have taken part. So call `check` after reading a result.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the communicator's resources. Idempotent."""

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor) -> None:
        """Replace the contiguous tensor `x` by its sum over all ranks."""

    @abstractmethod
    def _broadcast(self, x: torch.Tensor) -> None:
        """Replace the contiguous tensor `x` by rank 0's `x`."""


def _on_contiguous(collective: Callable[[torch.Tensor], None], x: torch.Tensor) -> None:
    """Call `collective`, which changes a contiguous tensor in place, for any tensor."""
    if x.is_contiguous():
        collective(x)
        return
    whole = x.contiguous()
    collective(whole)
    x.copy_(whole)


class SingleRank(Communicator):
    """The communicator of a worker with one rank: every collective returns the tensor that it got."""

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def gather(self, x: torch.Tensor, *, fixed_widths: bool = False) -> list[torch.Tensor] | None:
        """Return `[x]`."""
        return [x]

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    @property
    def can_capture(self) -> bool:
        """Return True: there is nothing to capture."""
        return True

    def end_step(self) -> None:
        """Do nothing: no rank can be lost."""

    def check(self) -> None:
        """Do nothing: no rank can be lost."""

    def close(self) -> None:
        """Do nothing."""

    def _all_reduce(self, x: torch.Tensor) -> None:
        """Do nothing."""

    def _broadcast(self, x: torch.Tensor) -> None:
        """Do nothing."""


SINGLE_RANK = SingleRank()


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

    def exchange(self, number: int, device: torch.device) -> list[int]:
        """Return every rank's number, in order of rank. All ranks make this call; for errors see `Communicator`."""
        if self.size == 1:
            return [number]
        numbers_R = torch.zeros(self.size, dtype=torch.int64, device=device)
        numbers_R[self.rank] = number
        numbers: list[int] = self.comm.all_reduce_(numbers_R).tolist()
        return numbers
