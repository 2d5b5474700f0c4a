"""How many threads run CPU kernels in this process."""

from __future__ import annotations

import os

_num_threads = 0


def set_num_threads(num_threads: int) -> None:
    """Set the number; 0 means as many as the process may use cores. The next launch brings the pool to it."""
    global _num_threads
    _num_threads = num_threads


def num_threads() -> int:
    """The number of threads, the launching one counted."""
    return _num_threads or num_usable_cores()


def num_usable_cores() -> int:
    """The number of cores that the operating system lets this process run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1
