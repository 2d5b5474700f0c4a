"""The communicator for ranks on several hosts or on CUDA devices: torch.distributed, with gloo on CPUs and nccl on CUDA.

GPUs of one host add small tensors over peer memory instead (`peer_memory`).

`work.wait()` of an nccl collective does not block the host: it orders the device's later work after the collective. If another rank
hangs, the device waits for ever, and so does the host when it next reads a result. nccl's own watchdog would end the process
without a report. So the thread of a `CollectiveWatch` checks the collectives in order, and calls `on_late` when one has been the
oldest for longer than the timeout. Sums over peer memory, and the collectives in a CUDA graph, have no such `work`: a mark at the
end of each step stands for them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from transom_core.errors import RankLost
from transom_worker.models.parallel.communicator import Communicator, Parallel

if TYPE_CHECKING:
    from transom_worker.models.parallel.peer_memory import PeerAllReduce

c10d: Any = torch.distributed  # its type stubs lack much of what it exports


class ProcessGroup(Communicator):
    """A communicator over a torch.distributed process group that belongs to this worker alone."""

    def __init__(self, address: str, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> None:
        """Connect to the other ranks through the TCPStore that listens at `address`, "IP:PORT" with a numeric IP.

        Raises:
            RankLost: no store listens there, or a rank did not connect within `timeout_s`.
        """
        self._rank, self._size, self._device, self._timeout_s = rank, size, device, timeout_s
        ip, _, port = address.rpartition(":")
        self._connection = (ip, int(port), rank, size, timedelta(seconds=timeout_s))
        make = _gloo if device == "cpu" else _nccl
        self._group: Any = self._try(lambda: make(*self._connection))
        self._peers: PeerAllReduce | None = None
        self._fixed_widths: list[int] | None = None  # see `gather`
        self._is_late = False
        self._watch = None if device == "cpu" else CollectiveWatch(timeout_s, self._give_up)

    def map_peers(self, host: str) -> None:
        """Add small tensors over peer memory from now on, if all ranks are on `host` and their GPUs can map each other's memory.

        All ranks make this call. Raises `RankLost`: a rank did not make it within the timeout.
        """
        from transom_worker.models.parallel.peer_memory import map_peers  # late: needs Triton

        ip, port, rank, size, timeout = self._connection
        device = torch.device("cuda", torch.cuda.current_device())
        self._peers = self._try(
            lambda: map_peers(_store(ip, port, timeout), rank=rank, size=size, host=host, device=device)
        )

    def _all_reduce(self, x: torch.Tensor) -> None:
        if self._peers is not None and self._peers.takes(x):
            self._open_group()
            self._peers.all_reduce_(x)
            if not _is_capturing():
                self.end_step()
        else:
            self._run(lambda group: group.allreduce([x]))

    def gather(self, x: torch.Tensor, *, fixed_widths: bool = False) -> list[torch.Tensor] | None:
        """See `Communicator.gather`. For the transfer, tensors are padded to the widest last axis."""
        sizes = self._fixed_widths if fixed_widths else None
        if sizes is None:
            sizes = Parallel(rank=self._rank, size=self._size, comm=self).exchange(x.shape[-1], x.device)
        if fixed_widths:
            self._fixed_widths = sizes
        padded = x.new_empty(*x.shape[:-1], max(sizes))
        padded[..., : x.shape[-1]] = x
        parts = [torch.empty_like(padded) for _ in sizes] if self._rank == 0 else []
        self._run(lambda group: group.gather([parts] if self._rank == 0 else [], [padded], c10d.GatherOptions()))
        return [part[..., :width] for part, width in zip(parts, sizes, strict=True)] if self._rank == 0 else None

    def _broadcast(self, x: torch.Tensor) -> None:
        self._run(lambda group: group.broadcast([x]))

    @property
    def can_capture(self) -> bool:
        """Return whether nccl, and not gloo on the host, computes the collectives."""
        return self._device != "cpu"

    def end_step(self) -> None:
        """See `Communicator.end_step`. A step whose collectives are in a CUDA graph is watched by its end alone."""
        if self._watch is not None:
            self._watch.add(DeviceMark())

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
            self._abort(group)

    def _run(self, start: Callable[[Any], Any]) -> None:
        group = self._open_group()
        work = self._try(lambda: start(group))
        # A captured collective runs when its graph is replayed, which `end_step` covers.
        if self._watch is not None and not _is_capturing():
            self._watch.add(work)
        self._try(work.wait)

    def _open_group(self) -> Any:
        if self._group is None:
            raise RankLost(f"Rank {self._rank} was closed.")
        self.check()
        return self._group

    def _give_up(self) -> None:
        """Abort the collectives that do not end. Then the thread that waits for the device continues, and `check` tells it why."""
        self._is_late = True
        if (group := self._group) is not None:
            self._abort(group)

    def _abort(self, group: Any) -> None:
        if self._peers is not None:
            self._peers.abort()
        group.abort()

    def _try(self, action: Callable[[], Any]) -> Any:
        """Return the result of `action`; raise RankLost instead of the RuntimeErrors of torch.distributed."""
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


def _store(ip: str, port: int, timeout: timedelta) -> Any:
    return c10d.TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _gloo(ip: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_ip(ip, port))]
    return c10d.ProcessGroupGloo(_store(ip, port, timeout), rank, size, options)


def _nccl(ip: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    # nccl's own watchdog aborts the process without a report; `CollectiveWatch` comes before it, which notices what is late by
    # `timeout` and is then up to a `LOOKS`th of it late itself.
    options._timeout = 2 * timeout
    return c10d.ProcessGroupNCCL(_store(ip, port, timeout), rank, size, options)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _own_ip(ip: str, port: int) -> str:
    """Return this host's address on the route to `ip`. Without it gloo looks up its own host name, which can take seconds."""
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        probe.connect((ip, port))
        return str(probe.getsockname()[0])


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


LOOKS = 20  # checks within a timeout; a collective that does not end is noticed 1/20 of the timeout late at most


class DeviceMark:
    """A point in the current stream, which is completed when the device has computed everything before it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        """Return whether the device has come here."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CollectiveWatch:
    """The collectives of one process group that may not have ended yet."""

    def __init__(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        """`on_late` is called once, on the watch's own thread."""
        self._timeout_s, self._on_late = timeout_s, on_late
        self._lock = threading.Lock()
        self._works: deque[Any] = deque()  # oldest first
        # Since when the oldest one is the oldest. Before, the device computed others: with two steps in flight, a step waits for
        # the whole step before it.
        self._since_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="transom-collectives", daemon=True).start()

    def add(self, work: Any) -> None:
        """Watch one more collective or `DeviceMark`. Those that have ended are dropped, because they keep their tensors alive."""
        with self._lock:
            self._drop_ended()
            if not self._works:
                self._since_s = time.monotonic()
            self._works.append(work)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._timeout_s / LOOKS):
            with self._lock:
                self._drop_ended()
                is_late = bool(self._works) and time.monotonic() - self._since_s > self._timeout_s
            if is_late:
                self._on_late()
                return

    def _drop_ended(self) -> None:
        while self._works and self._works[0].is_completed():
            self._works.popleft()
            self._since_s = time.monotonic()
