"""Finds out how much of the host's memory this process could still take."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transom_core.errors import ConfigError

MEMINFO = Path("/proc/meminfo")


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
    group's limit leaves.
    """
    available = _meminfo_available()
    for group in CGROUPS:
        try:
            limit, use = (group.folder / group.limit).read_text().strip(), int((group.folder / group.use).read_text())
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - use + _reclaimable_bytes(group)))
    return available


def _reclaimable_bytes(group: ControlGroup) -> int:
    """Return the bytes of file cache that count as used memory, such as weights that were just read; the kernel frees them when a
    process needs memory.
    """
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
