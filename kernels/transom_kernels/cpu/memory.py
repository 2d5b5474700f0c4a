"""Memory from the operating system, in huge pages if it has them.

A decode step reads from addresses that are far apart (weights of hundreds of MB, a layer's part of each KV block). With small pages
nearly every such read would miss the TLB.
"""

import contextlib
import mmap

import torch


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
