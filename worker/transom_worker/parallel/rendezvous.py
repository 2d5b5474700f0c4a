"""How the ranks of a worker find each other: somebody opens a meeting, tells all ranks its address, and they connect."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transom_worker.parallel.communicator import ALONE, Communicator
from transom_worker.parallel.process_group import ProcessGroup, listen
from transom_worker.parallel.rank_memory import MemoryFile
from transom_worker.parallel.shared_memory import SharedMemory, is_supported

MEMORY, TCP = "memory:", "tcp:"


def host_id() -> str:
    """The same for processes that can share memory and see each other: those of one running system and one pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


class Meeting:
    """Open from before the first rank connects until the last one has ended; `address` is what ranks need.

    Opened by any process of the ranks' own host, or where they are on several by one that all of them reach, such as rank 0.
    """

    def __init__(self, hosts: Sequence[str], *, device: str = "cpu", ip: str = "127.0.0.1") -> None:
        """`hosts` are the ranks' `host_id()`s; `ip` is this process's address as the ranks see it, used between hosts.

        Raises:
            RankLost: `ip` cannot be listened on.
        """
        self._opened: Any
        if device == "cpu" and is_supported() and set(hosts) == {host_id()}:
            self._opened = MemoryFile(len(hosts))
            self.address = MEMORY + self._opened.path
        else:
            self._opened = listen(ip)
            self.address = f"{TCP}{ip}:{self._opened.port}"

    def close(self) -> None:
        """Nobody can connect any more. Idempotent."""
        if isinstance(self._opened, MemoryFile):
            self._opened.close()
        self._opened = None  # a store ends with its last reference


def connect(address: str, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> Communicator:
    """Rank `rank`'s communicator, when all `size` ranks have come to the meeting. No operation waits longer than `timeout_s`.

    Raises:
        RankLost: a rank did not come in time, or the meeting is closed.
    """
    if size == 1:
        return ALONE
    if address.startswith(MEMORY):
        return SharedMemory(address.removeprefix(MEMORY), rank=rank, size=size, timeout_s=timeout_s)
    return ProcessGroup(address.removeprefix(TCP), rank=rank, size=size, timeout_s=timeout_s, device=device)
