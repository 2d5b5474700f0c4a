"""What a scrape reads of a router at that moment: requests, workers, and the process itself."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from resource import getpagesize

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from transom_cluster import __version__

_STATM = Path("/proc/self/statm")  # on Linux: sizes in pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """A router as it is now. `desired_workers` is None where their number does not follow the load."""

    num_waiting: int
    workers_by_state: Mapping[str, int]
    in_flight_by_worker: Mapping[str, int]
    desired_workers: int | None = None


class StateCollector(Collector):
    """Families that are read from `read` when somebody scrapes; workers that are gone are gone from them."""

    def __init__(self, own_labels: Mapping[str, str]) -> None:
        self.read: Callable[[], RouterState] | None = None
        self._names = list(own_labels)
        self._values = list(own_labels.values())

    def collect(self) -> Iterator[Metric]:
        """Families of this moment."""
        if self.read is not None:
            yield from self._router(self.read())
        yield from self._process()
        build = {"version": __version__, "python": platform.python_version(), "ray": ray_version()}
        yield self._gauge("transom_build_info", "Versions; always 1.", [([*build.values()], 1)], list(build))

    def _router(self, state: RouterState) -> Iterator[Metric]:
        text = "Requests that no worker has."
        yield self._gauge("transom_router_waiting_requests", text, [([], state.num_waiting)])
        workers = [([name], count) for name, count in state.workers_by_state.items()]
        text = "Workers by state: open, closed (starting or lost), draining."
        yield self._gauge("transom_router_workers", text, workers, ["state"])
        in_flight = [([worker], count) for worker, count in state.in_flight_by_worker.items()]
        text = "Requests that a worker has from this router."
        yield self._gauge("transom_router_in_flight_requests", text, in_flight, ["worker"])
        if state.desired_workers is not None:
            text = "Workers that the autoscaling policy would ask for from the loads that this router knows."
            yield self._gauge("transom_router_desired_workers", text, [([], state.desired_workers)])

    def _process(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            "transom_router_process_cpu_seconds", "Processor time of the router's process.", labels=self._names
        )
        cpu.add_metric(self._values, time.process_time())
        yield cpu
        if (num_bytes := resident_bytes()) is not None:
            text = "Memory of the router's process."
            yield self._gauge("transom_router_process_resident_bytes", text, [([], num_bytes)])

    def _gauge(
        self, name: str, text: str, samples: Sequence[tuple[list[str], float]], labels: Sequence[str] = ()
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=[*self._names, *labels])
        for values, value in samples:
            family.add_metric([*self._values, *values], value)
        return family


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * getpagesize()
    except OSError:
        return None


@functools.cache
def ray_version() -> str:
    """The installed Ray's, without importing it; empty where there is none."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""
