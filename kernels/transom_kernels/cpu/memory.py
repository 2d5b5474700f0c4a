"""Memory from the operating system, in huge pages where it has them.

What a decode step reads lies far apart (a weight of hundreds of MB, a layer's part of a block and the next block's), so with small
pages nearly each read misses the address cache (TLB).
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def lazy_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory, which takes space only once it is touched."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory would get small pages
    memory = mmap.mmap(-1, num_bytes, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def lazy_bytes(num_bytes: int) -> torch.Tensor:
    """`lazy_memory` as a tensor of bytes, which owns it."""
    return torch.frombuffer(lazy_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
