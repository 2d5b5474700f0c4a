"""Maps the memory that the ranks of one host share: a few integers and two buffers for each rank (`shared_memory` says why two).

    rank 0's integers | rank 1's integers | ... | buffer 0 of rank 0, rank 1, ... | buffer 1 of rank 0, rank 1, ...

The memory is an anonymous file (memfd), which no folder lists. The process that creates it keeps a descriptor; ranks open that
descriptor through /proc and map the file. The operating system frees the memory when the last of these processes has ended, for
whatever reason.
"""

import mmap
import os

import torch

BUFFER_BYTES = 2**22  # of each buffer; only its used pages take memory, and larger tensors are sent in pieces
LINE = 16  # integers of 8 bytes for each rank: two cache lines, since processors fetch neighbouring lines in pairs
MAX_VIEWS = 512  # cached tensor views, by dtype and shape


class MemoryFile:
    """Zeroed memory for `size` ranks. Processes of the same user and pid namespace open it by `path` until `close`."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("transom-ranks")
        os.ftruncate(self._fd, _total_bytes(size))
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Close the descriptor: no further process can open the memory. Mappings stay valid. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RankMemory:
    """One rank's mapping of the shared memory. `integers[rank * LINE + i]` is integer `i` of rank `rank`."""

    def __init__(self, path: str, size: int) -> None:
        """Map the memory at `path`.

        Raises:
            OSError: there is no such file.  ValueError: the file was made for another number of ranks.
        """
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
        """Return buffer `which` (0 or 1) of every rank as tensors of the dtype and shape of `like`, which must fit a buffer."""
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
