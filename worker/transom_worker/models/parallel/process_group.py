"""The communicator for ranks on several hosts or on CUDA devices: torch.distributed, with gloo on CPUs and nccl on CUDA.

`work.wait()` of an nccl collective does not block the host: it orders the device's later work after the collective. If another rank
hangs, the device waits for ever, and so does the host when it next reads a result. nccl's own watchdog would end the process
without a report. So a thread (`CollectiveWatch`) checks the collectives in order, and calls `on_late` when the oldest one is older
than the timeout.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from transom_core.errors import RankLost

LOOKS = 20  # checks within a timeout; a collective that does not end is noticed 1/20 of the timeout late at most

c10d: Any = torch.distributed  # its type stubs lack much of what it exports


class CollectiveWatch:
    """The collectives of one process group that may not have ended yet."""

    def __init__(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        """`on_late` is called once, on the watch's own thread."""
        self._timeout_s, self._on_late = timeout_s, on_late
        self._lock = threading.Lock()
        self._works: deque[tuple[Any, float]] = deque()  # (collective, time at which it was started), oldest first
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="transom-collectives", daemon=True).start()

    def add(self, work: Any) -> None:
        """Watch one more collective. Collectives that have ended are dropped, because they keep their tensors alive."""
        with self._lock:
            self._drop_ended()
            self._works.append((work, time.monotonic()))

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._timeout_s / LOOKS):
            with self._lock:
                self._drop_ended()
                is_late = bool(self._works) and time.monotonic() - self._works[0][1] > self._timeout_s
            if is_late:
                self._on_late()
                return

    def _drop_ended(self) -> None:
        while self._works and self._works[0][0].is_completed():
            self._works.popleft()


class ProcessGroup:
    """A communicator over a torch.distributed process group that belongs to this worker alone."""

    def __init__(self, address: str, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> None:
        """Connect to the other ranks through the TCPStore that listens at `address`, "IP:PORT" with a numeric IP.

        Raises:
            RankLost: no store listens there, or a rank did not connect within `timeout_s`.
        """
        self._rank, self._size, self._device, self._timeout_s = rank, size, device, timeout_s
        ip, _, port = address.rpartition(":")
        make = _gloo if device == "cpu" else _nccl
        self._group: Any = self._try(lambda: make(ip, int(port), rank, size, timedelta(seconds=timeout_s)))
        self._is_late = False
        self._watch = None if device == "cpu" else CollectiveWatch(timeout_s, self._give_up)

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce_`."""
        if not x.is_contiguous():
            return x.copy_(self.all_reduce_(x.contiguous()))
        self._run(lambda group: group.allreduce([x]))
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """See `Communicator.gather`. For the transfer, tensors are padded to the widest last axis."""
        widths = torch.zeros(self._size, dtype=torch.int64, device=x.device)
        widths[self._rank] = x.shape[-1]
        sizes: list[int] = self.all_reduce_(widths).tolist()
        padded = x.new_empty(*x.shape[:-1], max(sizes))
        padded[..., : x.shape[-1]] = x
        parts = [torch.empty_like(padded) for _ in sizes] if self._rank == 0 else []
        self._run(lambda group: group.gather([parts] if self._rank == 0 else [], [padded], c10d.GatherOptions()))
        return [part[..., :width] for part, width in zip(parts, sizes, strict=True)] if self._rank == 0 else None

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator.broadcast_`."""
        if not x.is_contiguous():
            return x.copy_(self.broadcast_(x.contiguous()))
        self._run(lambda group: group.broadcast([x]))
        return x

    def check(self) -> None:
        """See `Communicator.check`."""
        if self._is_late:
            raise RankLost(
                f"Rank {self._rank}: the other ranks are late by {self._timeout_s:g} s in a collective on the device."
            )

    def close(self) -> None:
        """Close the connections; ranks that wait for this rank raise RankLost. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _run(self, start: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise RankLost(f"Rank {self._rank} was closed.")
        self.check()
        work = self._try(lambda: start(group))
        if self._watch is not None:
            self._watch.add(work)
        self._try(work.wait)

    def _give_up(self) -> None:
        """Abort the collective that does not end. The thread that waits for the device continues then; `check` tells it why."""
        self._is_late = True
        if (group := self._group) is not None:
            group.abort()

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            late = f"Rank {self._rank} lost the other ranks, or they are late by {self._timeout_s:g} s"
            raise RankLost(f"{late}: {reason}") from error


def listen(ip: str) -> Any:
    """Open a TCPStore at a free port of `ip`, through which ranks find each other. It listens as long as the result is referenced.

    Raises:
        RankLost: `ip` is not an address of this host.
    """
    try:
        listener = socket.create_server((ip, 0), family=_family(ip))
    except OSError as error:
        raise RankLost(f"The ranks cannot rendezvous at {ip}: {error}.") from error
    port = listener.getsockname()[1]
    return c10d.TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _gloo(ip: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    store = c10d.TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timeout)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_ip(ip, port))]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(ip: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    store = c10d.TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timeout)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _own_ip(ip: str, port: int) -> str:
    """Return this host's address on the route to `ip`. Without it gloo looks up its own host name, which can take seconds."""
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        probe.connect((ip, port))
        return str(probe.getsockname()[0])


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET
