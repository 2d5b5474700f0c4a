"""Finds and kills the processes below one process, so that none of them outlives `transom serve`.

psutil identifies a process by its pid and its start time, so a later process that reuses the pid is not killed.
"""

import contextlib
import time
from collections.abc import Iterable

import psutil

GRACE_S = 1.0  # processes may end by themselves within this time
POLL_S = 0.02  # how often `end_processes` looks whether they have ended


def descendants_of(pid: int) -> list[psutil.Process]:
    """Return all running processes below `pid`, at any depth."""
    return list(filter(is_running, psutil.Process(pid).children(recursive=True)))


def children_of(pid: int) -> list[psutil.Process]:
    """Return the running processes that `pid` itself has started."""
    return list(filter(is_running, psutil.Process(pid).children()))


def end_processes(processes: list[psutil.Process]) -> None:
    """Wait up to `GRACE_S` for processes to end, then kill those that still run."""
    deadline_s = time.monotonic() + GRACE_S
    while any(map(is_running, processes)):
        if time.monotonic() > deadline_s:
            kill_processes(processes)
            return
        time.sleep(POLL_S)


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to the processes that still run."""
    for process in filter(is_running, processes):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended. A zombie has ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
