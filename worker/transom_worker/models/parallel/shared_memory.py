"""The communicator for ranks that are processes on one host: collectives through shared memory.

Every collective is one or more numbered operations. In operation `k` a rank

1. waits until every rank has published operation `k - 1`: then all have read operation `k - 2`, and buffer `k mod 2` is free;
2. writes its tensor into its own buffer `k mod 2`;
3. sets its `ready` integer to `k`;
4. reads another rank's buffer `k mod 2` once that rank's `ready` integer has reached `k`.

A reader that sees the integer also sees the whole tensor, because the tensor was stored first and x86-64 keeps the order of stores.
Other processors may not, so `is_supported` is false there.

A rank waits for another one (`Peer`) until it has reached an operation, or raises once that rank's process has ended or a deadline
has passed: it first spins, then yields the core to other processes, then sleeps.
"""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Sequence

import torch

from transom_core.errors import RankLost
from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.rank_memory import BUFFER_BYTES, LINE, RankMemory

SPINS = 200  # a few microseconds: a rank that computes the same layer is rarely later
# Then each check yields the core, until this long after the start, but not longer: on a busy machine a yield may last for a whole
# time slice of another process.
YIELD_S = 2e-4
NAP_S = 2e-5  # then the time between checks, until NAPS_S after the start
NAPS_S = 20e-3
POLL_MS = 1  # the time between checks from then on


class Peer:
    """Another rank's process, and the indexes `ready` and `left` of its two integers in `integers`."""

    def __init__(self, rank: int, pid: int, integers: memoryview[int], *, ready: int, left: int) -> None:
        """Raise RankLost if there is no process `pid`."""
        self.name = f"Rank {rank} (process {pid})"
        self._integers, self._ready, self._left = integers, ready, left
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise RankLost(f"{self.name} died while the ranks connected.") from None
        self._death = select.poll()
        self._death.register(self._process, select.POLLIN)

    def wait(self, target: int, timeout_s: float) -> None:
        """Wait until the rank has reached operation `target`.

        Raises:
            RankLost: the rank died, closed its communicator, or was later than `timeout_s`.
        """
        integers, ready = self._integers, self._ready
        for _ in range(SPINS):
            if integers[ready] >= target:
                return
        start = now = time.monotonic()
        while integers[ready] < target:
            self._raise_if_lost(target, now - start, timeout_s)
            if now - start < YIELD_S:
                os.sched_yield()
            elif now - start < NAPS_S:
                time.sleep(NAP_S)
            else:
                self._death.poll(POLL_MS)
            now = time.monotonic()

    def close(self) -> None:
        """Close the process descriptor. Call it once."""
        os.close(self._process)

    def _raise_if_lost(self, target: int, waited_s: float, timeout_s: float) -> None:
        gone = self._integers[self._left] or self._death.poll(0)
        if gone and self._integers[self._ready] < target:  # it may have reached `target` and ended since the last check
            raise RankLost(
                f"{self.name} {'closed' if self._integers[self._left] else 'died'} while other ranks waited for it."
            )
        if waited_s > timeout_s:
            message = f"{self.name} was not ready within {timeout_s:g} s; it hangs or its step is too long."
            raise RankLost(message, loss_cause="hung")


READY, PID, LEFT = 0, 1, 2  # indexes of a rank's integers: its last operation, its process id, and 1 once it has closed
RENDEZVOUS_NAP_S = 1e-3
SMALL_BYTES = 2**18  # up to this size every rank sums the whole tensor itself, which saves one wait


def is_supported() -> bool:
    """Return whether this machine keeps the order of stores and has the system calls memfd_create and pidfd_open."""
    return platform.machine() == "x86_64" and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


class SharedMemory(Communicator):
    """A communicator for CPU tensors. It sums in the order of ranks, so that every rank gets the same bits."""

    def __init__(self, path: str, *, rank: int, size: int, timeout_s: float) -> None:
        """Open the `MemoryFile` at `path` and wait for the other ranks.

        Raises:
            RankLost: the memory cannot be opened, or a rank did not connect within `timeout_s`.
        """
        self._rank, self._timeout_s = rank, timeout_s
        try:
            self._memory = RankMemory(path, size)
        except FileNotFoundError:  # the path is in /proc of the process that opened the rendezvous
            raise RankLost(f"Rank 0 died while the ranks connected: its memory ({path}) is gone.") from None
        except (OSError, ValueError) as error:
            raise RankLost(f"Rank {rank} cannot open the memory that the ranks share: {error}") from error
        self._integers = self._memory.integers
        self._own = rank * LINE
        self._integers[self._own + PID] = os.getpid()
        self._operation = 0
        self._peers: dict[int, Peer] = {}
        self._connect_all(size)

    def _all_reduce(self, x: torch.Tensor) -> None:
        for piece in _pieces(x):
            if len(self._peers) > 1 and piece.nbytes > SMALL_BYTES:
                self._reduce_by_shares(piece)
            else:
                self._publish(piece)
                self._wait_for_all()
                _sum(self._views(piece), out=piece)

    def gather(self, x: torch.Tensor, *, fixed_widths: bool = False) -> list[torch.Tensor] | None:
        """See `Communicator.gather`."""
        widths = self._widths(x)
        parts = [x.new_empty(*x.shape[:-1], width) for width in widths]
        parts[self._rank] = x.contiguous()
        pieces = [_pieces(part) for part in parts]
        for i in range(max(map(len, pieces))):
            self._gather_pieces([piece[i] if i < len(piece) else None for piece in pieces])
        return parts if self._rank == 0 else None

    def _broadcast(self, x: torch.Tensor) -> None:
        for piece in _pieces(x):
            self._publish(piece if self._rank == 0 else None)
            if self._rank != 0:
                self._peers[0].wait(self._operation, self._timeout_s)
                piece.copy_(self._views(piece)[0])

    @property
    def can_capture(self) -> bool:
        """Return False: CPUs have no graphs."""
        return False

    def end_step(self) -> None:
        """Do nothing: every collective has ended when its method returns."""

    def check(self) -> None:
        """Do nothing: a collective on the CPU has completed when it returns."""

    def close(self) -> None:
        """Mark this rank as closed; ranks that wait for it raise RankLost. Idempotent."""
        self._integers[self._own + LEFT] = 1
        while self._peers:
            self._peers.popitem()[1].close()

    def _reduce_by_shares(self, piece: torch.Tensor) -> None:
        """Reduce-scatter, then all-gather: each rank sums its share of the elements and publishes the sums."""
        self._publish(piece)
        self._wait_for_all()
        size = len(self._peers) + 1
        shares = piece.view(-1).tensor_split(size)
        own_share = [view.view(-1).tensor_split(size)[self._rank] for view in self._views(piece)]
        _sum(own_share, out=shares[self._rank])
        self._publish(shares[self._rank])
        self._wait_for_all()
        for rank in self._peers:
            shares[rank].copy_(self._views(shares[rank])[rank])

    def _publish(self, mine: torch.Tensor | None) -> None:
        """Begin the next operation and publish `mine`, the tensor that other ranks read from this rank, if there is one."""
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
            if integers[rank * LINE] < operation:  # READY is 0
                peer.wait(operation, self._timeout_s)

    def _widths(self, x: torch.Tensor) -> list[int]:
        """Return the size of the last axis of every rank's tensor."""
        width = torch.tensor(x.shape[-1])
        self._publish(width)
        self._wait_for_all()
        return [int(each) for each in self._views(width)]

    def _gather_pieces(self, pieces: Sequence[torch.Tensor | None]) -> None:
        """Run one operation: every rank publishes its piece, if it has one, and rank 0 copies the pieces of the others."""
        self._publish(pieces[self._rank])
        if self._rank != 0:
            return
        self._wait_for_all()
        for rank, piece in enumerate(pieces):
            if rank != 0 and piece is not None:
                piece.copy_(self._views(piece)[rank])

    def _connect_all(self, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            for rank in range(size):
                if rank != self._rank:
                    self._peers[rank] = self._connect(rank, deadline)
        except RankLost:
            self.close()
            raise

    def _connect(self, rank: int, deadline: float) -> Peer:
        line = rank * LINE
        while not (pid := self._integers[line + PID]):
            if time.monotonic() > deadline:
                raise RankLost(f"Rank {rank} did not connect within {self._timeout_s:g} s of rank {self._rank}.")
            time.sleep(RENDEZVOUS_NAP_S)
        return Peer(rank, pid, self._integers, ready=line + READY, left=line + LEFT)


def _sum(terms: Sequence[torch.Tensor], *, out: torch.Tensor) -> None:
    """Write the sum of `terms`, added in their order, to `out`."""
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a contiguous tensor as views that each fit a buffer."""
    if x.nbytes <= BUFFER_BYTES:
        return (x,)
    return torch.split(x.view(-1), BUFFER_BYTES // x.element_size())
