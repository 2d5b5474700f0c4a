"""Records collectives in programs, so that a replay calls them again on the same tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from transom_kernels.cpu.recording import host_call
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator, Parallel


class RecordedCollectives:
    """A communicator that adds its calls to the program that is being recorded, if there is one."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce_`."""
        host_call(lambda: self._comm.all_reduce_(x))
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """See `Communicator.gather`; only used outside of forward passes."""
        return self._comm.gather(x)

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.broadcast_`."""
        host_call(lambda: self._comm.broadcast_(x))
        return x

    @property
    def can_capture(self) -> bool:
        """See `Communicator.can_capture`."""
        return self._comm.can_capture

    def end_step(self) -> None:
        """See `Communicator.end_step`."""
        self._comm.end_step()

    def check(self) -> None:
        """See `Communicator.check`."""
        self._comm.check()

    def close(self) -> None:
        """See `Communicator.close`."""
        self._comm.close()


def with_recorded_collectives(parallel: Parallel) -> Parallel:
    """Return the same rank with a communicator whose calls can be recorded."""
    return parallel if parallel.comm is SINGLE_RANK else replace(parallel, comm=RecordedCollectives(parallel.comm))
