"""The number of threads that run CPU kernels in this process."""

import os

_num_threads = 0


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads; 0 means one for each core that the process may use. It takes effect with the next launch."""
    global _num_threads
    _num_threads = num_threads


def num_threads() -> int:
    """Return the number of threads, including the one that launches."""
    return _num_threads or num_usable_cores()


def num_usable_cores() -> int:
    """Return the number of cores on which the operating system lets this process run."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1
