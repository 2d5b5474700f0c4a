"""Connects the ranks of a worker with each other.

One process opens a `Rendezvous` and gives its address to every rank. Each rank calls `connect` with that address and gets its
`Communicator`, which sums and gathers tensors over all ranks. The address names the transport: `memory:PATH` for ranks that share
memory on one host, `tcp:IP:PORT` for all others.
"""

import os
from collections.abc import Sequence
from typing import Any

from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.process_group import ProcessGroup, listen
from transom_worker.models.parallel.rank_memory import MemoryFile
from transom_worker.models.parallel.shared_memory import SharedMemory, is_supported

MEMORY, TCP = "memory:", "tcp:"


def host_id() -> str:
    """Return an id that is equal in two processes exactly if they can share memory: same booted system, same pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


class Rendezvous:
    """The place where ranks connect, at `address`. It must stay open until the last rank has ended.

    Any process that all ranks can reach may open it: one on their host, or, if they are on several hosts, for example rank 0.
    """

    def __init__(self, hosts: Sequence[str], *, device: str = "cpu", ip: str = "127.0.0.1") -> None:
        """`hosts` are the ranks' `host_id()`s; `ip` is the address at which ranks reach this process if they do not share memory.

        Raises:
            RankLost: this process cannot listen at `ip`.
        """
        self._opened: Any
        if device == "cpu" and is_supported() and set(hosts) == {host_id()}:
            self._opened = MemoryFile(len(hosts))
            self.address = MEMORY + self._opened.path
        else:
            self._opened = listen(ip)
            self.address = f"{TCP}{ip}:{self._opened.port}"

    def close(self) -> None:
        """Close the rendezvous: no further rank can connect. Idempotent."""
        if isinstance(self._opened, MemoryFile):
            self._opened.close()
        self._opened = None  # a TCPStore closes with its last reference


def connect(address: str, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> Communicator:
    """Wait until all `size` ranks have connected, and return this rank's communicator, whose operations wait `timeout_s` at most.

    Raises:
        RankLost: a rank did not connect in time, or the rendezvous is closed.
    """
    if address.startswith(MEMORY):
        return SharedMemory(address.removeprefix(MEMORY), rank=rank, size=size, timeout_s=timeout_s)
    group = ProcessGroup(address.removeprefix(TCP), rank=rank, size=size, timeout_s=timeout_s, device=device)
    if device != "cpu":
        group.map_peers(host_id())
    return group
