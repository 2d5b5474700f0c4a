"""Finds out how much of the host's memory this process could still take, gives the host memory that the process has freed, and
keeps garbage collections short."""

import ctypes
import functools
import gc
import threading
import time
from pathlib import Path
from typing import NamedTuple

from transom_core.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
KEPT_BYTES = 4 << 20  # of freed memory, in each arena; the buffers of most requests are smaller
RETURN_PERIOD_S = 20.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LIBC = ctypes.CDLL(None)


class ControlGroup(NamedTuple):
    """The files in which one version of Linux control groups (cgroups) keeps the memory limit and the memory use of this
    process.

    `cache` names the line of `memory.stat` that counts file cache: the kernel frees it as soon as a process needs memory.
    """

    folder: Path
    limit: str
    use: str
    cache: str


CGROUPS = (
    ControlGroup(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    ControlGroup(
        Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)


def available_host_bytes() -> int:
    """Return how much memory this process could still take: the smaller of what the machine has available and what the control
    group's limit leaves."""
    available = _meminfo_available()
    for group in CGROUPS:
        try:
            limit, use = (group.folder / group.limit).read_text().strip(), int((group.folder / group.use).read_text())
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - use + _reclaimable_bytes(group)))
    return available


def keep_little_freed_memory() -> None:
    """Have malloc keep at most `KEPT_BYTES` of freed memory above the last chunk in use of each arena, instead of up to 64 MiB.
    Each thread may have an arena. Without glibc's malloc this does nothing."""
    if (set_option := getattr(_LIBC, "mallopt", None)) is not None:
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)
        set_option(M_MMAP_THRESHOLD, KEPT_BYTES)  # larger chunks return to the kernel when they are freed


def return_freed_memory() -> None:
    """Give the kernel the freed memory between chunks in use, which malloc keeps otherwise; does nothing without glibc's malloc.

    The call takes a few milliseconds for each 100 MiB, without the GIL.
    """
    if (trim := getattr(_LIBC, "malloc_trim", None)) is not None:
        trim(0)


@functools.cache
def keep_returning_freed_memory() -> None:
    """Call `return_freed_memory` every `RETURN_PERIOD_S` from now on, on a thread of its own; idempotent.

    Otherwise a process that serves requests grows for hours: small chunks that live long, such as cache entries, lie among those of
    requests, and malloc returns nothing below them.
    """
    if hasattr(_LIBC, "malloc_trim"):
        threading.Thread(target=_keep_returning, name="transom-trim", daemon=True).start()


def freeze_objects() -> None:
    """Collect garbage, and leave what there is out of all later collections: over the objects that a process has made while it
    started, each would take tens of milliseconds of its streams' time."""
    gc.collect()
    gc.freeze()


def _keep_returning() -> None:
    while True:
        time.sleep(RETURN_PERIOD_S)
        return_freed_memory()


def _reclaimable_bytes(group: ControlGroup) -> int:
    """Return the bytes of file cache that count as used memory, such as weights that were just read; the kernel frees them when a
    process needs memory."""
    try:
        lines = (group.folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{group.cache} ")), 0)


def _meminfo_available() -> int:
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{MEMINFO} does not say how much memory is available; give --kv-cache-memory-bytes.")
