"""The processes below one, by /proc, so that nothing outlives `transom serve`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 1.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from a later one with the same pid by its start time (in clock ticks)."""

    pid: int
    start_ticks: int


def processes_below(pid: int) -> list[Process]:
    """All descendants of `pid`."""
    children = _children()
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        for process in children.get(waiting.pop(), ()):
            found.append(process)
            waiting.append(process.pid)
    return found


def children_of(pid: int) -> list[Process]:
    """The processes that `pid` itself has started."""
    return _children().get(pid, [])


def end_processes(processes: list[Process]) -> None:
    """Give processes that are ending a moment, then kill those that are left."""
    give_up_s = time.monotonic() + GRACE_S
    while any(map(is_running, processes)):
        if time.monotonic() > give_up_s:
            kill_processes(processes)
            return
        time.sleep(POLL_S)


def kill_processes(processes: Iterable[Process]) -> None:
    """Kill those that still run, without a chance to do anything."""
    for process in filter(is_running, processes):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def is_running(process: Process) -> bool:
    """Whether it has not ended."""
    stat = _stat(process.pid)
    return stat is not None and stat[1] == process


def _children() -> dict[int, list[Process]]:
    """Every process by its parent."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (stat := _stat(int(folder.name))):
            parent, process = stat
            children.setdefault(parent, []).append(process)
    return children


def _stat(pid: int) -> tuple[int, Process] | None:
    """Parent and identity; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    if fields[0] == "Z":
        return None
    return int(fields[1]), Process(pid, int(fields[19]))
