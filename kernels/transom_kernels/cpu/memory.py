"""Memory from the operating system, in huge pages if it has them.

A decode step reads from addresses that are far apart (weights of hundreds of MB, a layer's part of each KV block). With small pages
nearly every such read would miss the TLB.
"""

import contextlib
import mmap
import threading

import torch

from transom_kernels.cpu.bounds import CHECKED

_PIECE_BYTES = 64 << 20


def lazy_memory(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory, which takes up space only when it is first touched."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Linux gives shared memory, mmap's default, small pages
    memory = mmap.mmap(-1, num_bytes, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def lazy_bytes(num_bytes: int) -> torch.Tensor:
    """Return `lazy_memory` as a tensor of bytes, which owns it."""
    # mmap refuses 0 bytes
    return torch.frombuffer(lazy_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]


class _Piece(threading.local):
    """The memory into which a thread packs its next weights."""

    memory: torch.Tensor | None = None


_piece = _Piece()


def weight_memory(num_bytes: int) -> torch.Tensor:
    """Return memory for a weight that begins at a multiple of a cache line: a large weight's own, or the next part of a piece.

    A decode step reads all weights once, so they are packed one after the other into large pieces. A piece is freed when the last
    of its weights is gone.
    """
    # checked kernels could not tell a weight from its neighbours in a piece; large weights would leave pieces half empty
    if CHECKED or num_bytes > _PIECE_BYTES // 4:
        return lazy_bytes(num_bytes)
    rest = _piece.memory
    if rest is None or len(rest) < num_bytes:
        rest = lazy_bytes(_PIECE_BYTES)
    _piece.memory = rest[-(-num_bytes // 64) * 64 :]
    return rest[:num_bytes]
