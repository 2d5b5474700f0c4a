"""The memory that ranks on one host share: a line of integers and two buffers for each.

It belongs to no folder: whoever makes it holds a descriptor, ranks open that through its process and map it, and the kernel frees
it with the last of them, however they end.
"""

from __future__ import annotations

import mmap
import os

import torch

BUFFER_BYTES = (
    2**22
)  # of each of a rank's two buffers, of which only what is used takes memory; larger tensors go in pieces
LINE = 16  # integers of 8 bytes: two cache lines, since neighbours are fetched in pairs
MAX_VIEWS = 512  # kept of tensors' shapes


class MemoryFile:
    """Zeroed memory for `size` ranks; other processes of this user and pid namespace open it by `path` while this is open."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("transom-ranks")
        os.ftruncate(self._fd, _total_bytes(size))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Nobody can open it any more; those who have it keep it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RankMemory:
    """One rank's mapping. `integers[rank * LINE + i]` is integer i of a rank's line."""

    def __init__(self, path: str, size: int) -> None:
        """Raises OSError where there is no such file, ValueError where it was made for another number of ranks."""
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != _total_bytes(size):
                raise ValueError(f"{path} was not made for {size} ranks.")
            mapped = mmap.mmap(file.fileno(), _total_bytes(size))
        self.integers = memoryview(mapped)[: _header_bytes(size)].cast("q")
        with torch.inference_mode(False):
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self._buffers = whole[_header_bytes(size) :].view(2, size, BUFFER_BYTES)
        self._views: dict[tuple[int, torch.dtype, torch.Size], list[torch.Tensor]] = {}

    def views(self, which: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Buffer `which` (0 or 1) of every rank as a tensor of that dtype and shape, which must fit."""
        key = (which, like.dtype, like.shape)
        found = self._views.get(key)
        if found is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                found = [buffer[: like.nbytes].view(like.dtype).view(like.shape) for buffer in self._buffers[which]]
            self._views[key] = found
        return found


def _header_bytes(size: int) -> int:
    return -(-size * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + 2 * size * BUFFER_BYTES
