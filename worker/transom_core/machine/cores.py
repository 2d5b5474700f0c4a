"""Divides a machine's cores among the workers, or among the ranks of one worker, and keeps threads on their share.

If two workers with four threads each run on eight cores, the system may put threads of both on one core while another core is idle,
and a step waits for its slowest thread. So the threads of each worker keep to cores of their own. Inside their share threads may
move, since the router and other programs need cores too. Threads whose share would be a single cpu are not restricted.

    cpu          a logical processor of the system; a core with two hardware threads has two cpus, which are siblings
    CoreShare    part `index` of `count` equal parts of the cpus; siblings are in one part where the sizes allow it

Example: 4 cores with siblings (0, 4), (1, 5), (2, 6) and (3, 7): part 0 of 2 is {0, 4, 1, 5}, part 1 is {2, 6, 3, 7}.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from transom_core.config import CoreShare

LEAST_CPUS = 2  # threads are not restricted to smaller shares

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def keep_to_share(share: CoreShare) -> frozenset[int] | None:
    """Restrict this thread, and the threads that it starts from now on, to a share of the cpus that it may use.

    Returns the share's cpus, or None if nothing changes: the share is the whole machine or has too few cpus, its worker only runs
    beside all others for a moment (`index` is not below `count`), or the system has no such setting.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    if affinity is None or share.count == 1 or share.index >= share.count:
        return None
    cpus = cpus_of(share, affinity(0))
    if len(cpus) < LEAST_CPUS:
        return None
    os.sched_setaffinity(0, cpus)
    return cpus


def cpus_of(
    share: CoreShare, usable: Iterable[int], siblings_of: Callable[[int], tuple[int, ...]] | None = None
) -> frozenset[int]:
    """Return the cpus of one share of the usable ones. All shares have the same number of cpus, so a few cpus may belong to
    none."""
    siblings = siblings_of or read_siblings
    ordered = sorted(usable, key=lambda cpu: (min(siblings(cpu), default=cpu), cpu))
    size = len(ordered) // share.count
    return frozenset(ordered[share.index * size : (share.index + 1) * size])


def read_siblings(cpu: int) -> tuple[int, ...]:
    """Return the cpus that share a core with this one, itself included, such as (0, 4); only the cpu itself if the system does not
    tell."""
    try:
        text = Path(_SIBLINGS.format(cpu)).read_text().strip()
        ranges = [part.partition("-") for part in text.split(",")]
        return tuple(one for first, _, last in ranges for one in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return (cpu,)
