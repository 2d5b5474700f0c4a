"""Ranks that are processes on one host add up through memory that they share.

In operation `k` a rank writes to its buffer `k mod 2`, sets its `ready` integer to `k`, and reads the others' buffers when their
integers reach `k`. It reads before its next operation begins, so a buffer is free again once all ranks are ready with the operation
in between. Data and integer are kept together by the order of stores alone, which x86-64 guarantees and other machines do not.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence

import torch

from transom_worker.errors import RankLost
from transom_worker.parallel.peer import Peer
from transom_worker.parallel.rank_memory import BUFFER_BYTES, LINE, RankMemory

READY, PID, LEFT = 0, 1, 2  # integers of a rank's line
MEETING_NAP_S = 1e-3
SMALL_BYTES = 2**18  # up to which every rank adds everything up: one wait less


def is_supported() -> bool:
    """Whether this machine keeps the order of stores and has the system calls."""
    return platform.machine() == "x86_64" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


class SharedMemory:
    """A communicator for CPU tensors; sums are taken in order of rank."""

    def __init__(self, path: str, *, rank: int, size: int, timeout_s: float) -> None:
        """Opens the ranks' `MemoryFile` and waits for the others.

        Raises:
            RankLost: it cannot be opened, or a rank did not come within `timeout_s`.
        """
        self._rank, self._timeout_s = rank, timeout_s
        try:
            self._memory = RankMemory(path, size)
        except FileNotFoundError:  # it is open in the first rank's process, as long as that lives
            raise RankLost(f"Rank 0 died while the ranks met: its memory ({path}) is gone.") from None
        except (OSError, ValueError) as error:
            raise RankLost(f"Rank {rank} cannot open the memory that its group shares: {error}") from error
        self._integers = self._memory.integers
        self._own = rank * LINE
        self._integers[self._own + PID] = os.getpid()
        self._operation = 0
        self._peers: dict[int, Peer] = {}
        self._meet_all(size)

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; the same bits on every rank."""
        if not x.is_contiguous():
            return x.copy_(self.all_reduce_(x.contiguous()))
        for piece in _pieces(x):
            if len(self._peers) > 1 and piece.nbytes > SMALL_BYTES:
                self._add_up_by_shares(piece)
            else:
                self._give(piece)
                self._wait_for_all()
                _sum(self._views(piece), out=piece)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """On the first rank every rank's tensor, on others None."""
        widths = self._widths(x)
        parts = [x.new_empty(*x.shape[:-1], width) for width in widths]
        parts[self._rank] = x.contiguous()
        pieces = [_pieces(part) for part in parts]
        for i in range(max(map(len, pieces))):
            self._gather_pieces([piece[i] if i < len(piece) else None for piece in pieces])
        return parts if self._rank == 0 else None

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x` on every rank, in place."""
        if not x.is_contiguous():
            return x.copy_(self.broadcast_(x.contiguous()))
        for piece in _pieces(x):
            self._give(piece if self._rank == 0 else None)
            if self._rank != 0:
                self._peers[0].wait(self._operation, self._timeout_s)
                piece.copy_(self._views(piece)[0])
        return x

    def close(self) -> None:
        """Leave: whoever waits for this rank gets RankLost. Idempotent."""
        self._integers[self._own + LEFT] = 1
        while self._peers:
            self._peers.popitem()[1].close()

    def _add_up_by_shares(self, piece: torch.Tensor) -> None:
        """Each rank adds up its share of the elements and gives the sums to the others: less to add for each of many ranks."""
        self._give(piece)
        self._wait_for_all()
        size = len(self._peers) + 1
        shares = piece.view(-1).tensor_split(size)
        given = [view.view(-1).tensor_split(size)[self._rank] for view in self._views(piece)]
        _sum(given, out=shares[self._rank])
        self._give(shares[self._rank])
        self._wait_for_all()
        for rank in self._peers:
            shares[rank].copy_(self._views(shares[rank])[rank])

    def _give(self, mine: torch.Tensor | None) -> None:
        """Begin the next operation, with a tensor for the others if there is one."""
        if self._integers[self._own + LEFT]:
            raise RankLost(f"Rank {self._rank} was closed.")
        self._wait_for_all()
        self._operation += 1
        if mine is not None:
            self._views(mine)[self._rank].copy_(mine)
        self._integers[self._own + READY] = self._operation

    def _views(self, like: torch.Tensor) -> list[torch.Tensor]:
        return self._memory.views(self._operation & 1, like)

    def _wait_for_all(self) -> None:
        integers, operation = self._integers, self._operation
        for rank, peer in self._peers.items():
            if integers[rank * LINE] < operation:
                peer.wait(operation, self._timeout_s)

    def _widths(self, x: torch.Tensor) -> list[int]:
        """Every rank's last axis."""
        width = torch.tensor(x.shape[-1])
        self._give(width)
        self._wait_for_all()
        return [int(each) for each in self._views(width)]

    def _gather_pieces(self, pieces: Sequence[torch.Tensor | None]) -> None:
        """One operation: every rank gives its piece, if it has one, and the first fills in those of the others."""
        self._give(pieces[self._rank])
        if self._rank != 0:
            return
        self._wait_for_all()
        for rank, piece in enumerate(pieces):
            if rank != 0 and piece is not None:
                piece.copy_(self._views(piece)[rank])

    def _meet_all(self, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            for rank in range(size):
                if rank != self._rank:
                    self._peers[rank] = self._meet(rank, deadline)
        except RankLost:
            self.close()
            raise

    def _meet(self, rank: int, deadline: float) -> Peer:
        line = rank * LINE
        while not (pid := self._integers[line + PID]):
            if time.monotonic() > deadline:
                raise RankLost(f"Rank {rank} did not come within {self._timeout_s:g} s of rank {self._rank}.")
            time.sleep(MEETING_NAP_S)
        return Peer(rank, pid, self._integers, ready=line + READY, left=line + LEFT)


def _sum(terms: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    """In order, into `out`."""
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """A contiguous tensor as views that fit a buffer."""
    if x.nbytes <= BUFFER_BYTES:
        return (x,)
    return torch.split(x.view(-1), BUFFER_BYTES // x.element_size())
