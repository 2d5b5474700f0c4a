"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from transom_worker.parallel import ALONE, Parallel

TIMEOUT_S = 30.0


class Table:
    """Where the ranks lay what they bring, and wait for each other."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadCommunicator:
    """One rank at the table; counts what it passes round."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank = table, rank
        self.gathered_elements = 0
        self.num_operations = 0

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(x)
        total = first.clone()
        for other in others:
            total += other
        return x.copy_(total)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        self.gathered_elements += x.numel()
        parts = self._exchange(x)
        return parts if self.rank == 0 else None

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x)[0])

    def close(self) -> None:
        self.table.barrier.abort()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.num_operations += 1
        self.table.brought[self.rank] = x.clone()
        self.table.barrier.wait(TIMEOUT_S)
        found = list(self.table.brought)
        self.table.barrier.wait(TIMEOUT_S)
        return found


def on_ranks(size: int, body: Callable[[Parallel], Any]) -> list[Any]:
    """What `body` returns on each of `size` ranks that run at once; an error on one frees the others."""
    table = Table(size)

    def run(rank: int) -> Any:
        comm = ThreadCommunicator(table, rank)
        try:
            return body(Parallel(rank=rank, size=size, comm=comm if size > 1 else ALONE))
        except BaseException:
            comm.close()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
