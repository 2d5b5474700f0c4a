"""Memory from the operating system, in huge pages where it has them."""

from __future__ import annotations

import contextlib
import mmap


def lazy_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory, which takes space only once it is touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
