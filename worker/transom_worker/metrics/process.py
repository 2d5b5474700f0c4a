"""What the worker's main process uses, read from the system at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_worker.metrics.own_labels import OwnLabels


class Process(Collector):
    """The client library's figures under the worker's labels; no samples where the system does not tell (macOS)."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self._reader = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """At scrape time."""
        found = {family.name: [((), sample.value) for sample in family.samples] for family in self._reader.collect()}
        yield self._own.counters(
            "transom_process_cpu_seconds",
            "Seconds of CPU time, user and system, that the worker's main process has used, all threads together.",
            (),
            found.get("process_cpu_seconds", []),
        )
        yield self._own.gauges(
            "transom_process_resident_bytes",
            "Bytes of memory that the worker's main process has resident, shared pages included.",
            (),
            found.get("process_resident_memory_bytes", []),
        )
