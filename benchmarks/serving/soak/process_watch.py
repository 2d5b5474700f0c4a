"""Samples every process of the server: resident memory, descriptors, threads; and fits how fast memory grows.

The slope of a kind of process is one least-squares fit over all its processes with an intercept for each, so that a restart is no
step. A process counts from its own start plus a warm-up.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
    rss: int
    pss: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one kind of process over an interval."""

    kind: str
    num_processes: int
    observed_h: float
    rss_mib: float
    rss_mib_per_h: float
    pss_mib_per_h: float


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
        found = (_sample(process) for process in self._server.processes())
        return [sample for sample in found if sample is not None]

    def growth(self, begin_s: float, end_s: float, warm_up_s: float) -> list[Growth]:
        """A row for each kind of process, from samples between two times (`time.time`), without the first `warm_up_s`."""
        kinds: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for one in self.samples:
            if max(begin_s, one.start_s) + warm_up_s <= one.time_s <= end_s:
                kinds[one.kind][one.pid].append(one)
        return [_growth(kind, pids.values()) for kind, pids in sorted(kinds.items())]


def _sample(process: psutil.Process) -> Sample | None:
    try:
        with process.oneshot():
            memory = process.memory_full_info()
            return Sample(
                name_of(process), process.pid, process.create_time(), time.time(),
                memory.rss, memory.pss, process.num_fds(), process.num_threads(),
            )  # fmt: skip
    except (psutil.Error, FileNotFoundError):
        return None


def _growth(kind: str, processes: Iterable[list[Sample]]) -> Growth:
    rows = [samples for samples in processes if len(samples) > 2]
    observed_s = sum(samples[-1].time_s - samples[0].time_s for samples in rows)
    newest = [samples[-1].rss for samples in rows]
    return Growth(
        kind,
        len(rows),
        observed_s / 3600,
        sum(newest) / len(newest) / MIB if newest else 0.0,
        slope_per_h(rows, lambda one: one.rss / MIB),
        slope_per_h(rows, lambda one: one.pss / MIB),
    )


def slope_per_h(rows: Iterable[list[Sample]], value: Callable[[Sample], float]) -> float:
    """The common slope of several processes' values, each with an intercept of its own."""
    products = squares = 0.0
    for samples in rows:
        mean_s = sum(one.time_s for one in samples) / len(samples)
        mean = sum(map(value, samples)) / len(samples)
        products += sum((one.time_s - mean_s) * (value(one) - mean) for one in samples)
        squares += sum((one.time_s - mean_s) ** 2 for one in samples)
    return 3600 * products / squares if squares else 0.0


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
