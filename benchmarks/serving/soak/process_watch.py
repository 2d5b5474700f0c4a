"""Samples every process of the server: memory, descriptors, threads; and fits how fast memory grows.

The slope of a kind of process is one least-squares fit over all its processes with an intercept for each, so that a restart is no
step. A process counts from its own start plus a warm-up.

Anonymous memory alone counts. All processes map Ray's object store, whose size is fixed when it starts (100 MiB here); a page
counts in each process that has ever read an object there, up to the whole store. Pages of files, such as code, come and go as the
kernel needs memory: in one soak, 30 MiB a router went when other programs filled the page cache.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.server_process import ServerProcess
from benchmarks.serving.process_names import name_of

PERIOD_S = 5.0
# kind -> how much there may be: two chat templates for each router; a grammar check for each router and worker, and one more for
# patient checks; Ray's monitor has up to 200 logs open, of dead processes too
STARTED_ON_DEMAND = {"chat template": 4, "grammar check": 8, "log monitor": 220}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time (`time.time`)."""

    kind: str
    pid: int
    start_s: float
    time_s: float
    anonymous_mib: float
    num_fds: int
    num_threads: int


class ProcessWatch:
    """Samples from `run` on, every `PERIOD_S`."""

    def __init__(self, server: ServerProcess) -> None:
        self.samples: list[Sample] = []
        self._server = server

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Sample until `is_over()`."""
        while not is_over():
            with contextlib.suppress(psutil.Error):  # a process that ends meanwhile
                self.samples += await asyncio.to_thread(self.look)
            await asyncio.sleep(PERIOD_S)

    def look(self) -> list[Sample]:
        """All processes now."""
        return [found for process in self._server.processes() if (found := _sample(process)) is not None]

    def levels_mib(self, begin_s: float, end_s: float) -> dict[str, list[float]]:
        """Kind and pid of a process -> its memory in each minute between two times (`time.time`), the median."""
        minutes: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for one in self.samples:
            if begin_s <= one.time_s <= end_s:
                minutes[f"{one.kind} {one.pid}"][int((one.time_s - begin_s) // 60)].append(one.anonymous_mib)
        return {name: [round(median(some), 1) for some in each.values()] for name, each in sorted(minutes.items())}

    def growth_mib_per_h(self, begin_s: float, end_s: float, warm_up_s: float) -> dict[str, float]:
        """Kind of process -> how fast its memory grew between two times (`time.time`), without the first `warm_up_s`."""
        kinds: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for one in self.samples:
            if max(begin_s, one.start_s) + warm_up_s <= one.time_s <= end_s:
                kinds[one.kind][one.pid].append(one)
        return {kind: slope_per_h(pids.values()) for kind, pids in sorted(kinds.items())}


def _sample(process: psutil.Process) -> Sample | None:
    try:
        with process.oneshot():
            return Sample(
                name_of(process), process.pid, process.create_time(), time.time(),
                _anonymous_bytes(process.pid) / MIB, process.num_fds(), process.num_threads(),
            )  # fmt: skip
    except (psutil.Error, FileNotFoundError, ProcessLookupError):
        return None


def _anonymous_bytes(pid: int) -> int:
    """Return a process's anonymous memory. Raises FileNotFoundError if the process has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def slope_per_h(processes: Iterable[list[Sample]]) -> float:
    """The common slope of several processes' memory in MiB an hour; 0 without two samples of one process."""
    points = [np.array([(one.time_s, one.anonymous_mib) for one in samples]) for samples in processes]
    # An intercept for each process: its own mean is the middle of its line.
    times_s, sizes_mib = np.concatenate([some - some.mean(axis=0) for some in points] or [np.zeros((1, 2))]).T
    squares = times_s @ times_s
    return 3600 * float(times_s @ sizes_mib / squares) if squares else 0.0


def leftovers(before: Iterable[Sample], after: Iterable[Sample], allowed: int) -> list[str]:
    """Kinds whose processes became more, or whose largest process has more descriptors or threads than `allowed` more."""
    first, last = _most_by_kind(before), _most_by_kind(after)
    wrong = []
    for kind, counts in last.items():
        for what, now in counts.items():
            then = first.get(kind, {}).get(what, 0)
            if now > max(then + (0 if what == "processes" else allowed), STARTED_ON_DEMAND.get(kind, 0)):
                wrong.append(f"{kind}: {now} {what}, {then} before")
    return wrong


def _most_by_kind(samples: Iterable[Sample]) -> dict[str, dict[str, int]]:
    """Kind of process -> the number of its processes, and the descriptors and threads of the one that has most."""
    kinds: dict[str, list[Sample]] = defaultdict(list)
    for one in samples:
        kinds[one.kind].append(one)
    return {
        kind: {
            "processes": len(ones),
            "descriptors": max(one.num_fds for one in ones),
            "threads": max(one.num_threads for one in ones),
        }
        for kind, ones in kinds.items()
    }
