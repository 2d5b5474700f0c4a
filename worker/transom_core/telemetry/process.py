"""Metric families of the CPU time and the memory that a worker's or router's process uses, read from the system at a scrape."""

from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_core.telemetry.own_labels import OwnLabels


class Process(Collector):
    """The client library's process metrics with Transom's names and labels; no samples on systems without /proc (macOS).

    Names begin with `prefix`; `whose` names the process in the HELP texts.
    """

    def __init__(
        self, own: OwnLabels, *, prefix: str = "transom_process", whose: str = "worker's main process"
    ) -> None:
        self._own, self._prefix, self._whose = own, prefix, whose
        self._reader = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Make the metric families; the client library calls this at each scrape."""
        found = {family.name: [((), sample.value) for sample in family.samples] for family in self._reader.collect()}
        yield self._own.counters(
            f"{self._prefix}_cpu_seconds",
            f"Seconds of CPU time, user and system, of all threads of the {self._whose}.",
            (),
            found.get("process_cpu_seconds", []),
        )
        yield self._own.gauges(
            f"{self._prefix}_resident_bytes",
            f"Resident bytes of the {self._whose}, shared pages included.",
            (),
            found.get("process_resident_memory_bytes", []),
        )
