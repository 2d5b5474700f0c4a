"""Metrics of KV transfer: prefixes that this worker fetched from other workers, and prefixes that it lent to them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.kvcache.tiers.transfer.transfer_report import (
    EXPORT_OUTCOMES,
    FETCH_OUTCOMES,
    ExportOutcome,
    FetchReport,
    TransferObserver,
)

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OUTCOMES = (*(("in", outcome) for outcome in FETCH_OUTCOMES), *(("out", outcome) for outcome in EXPORT_OUTCOMES))


class Transfers(TransferObserver):
    """Counts what a worker's KV transfer reports. Any thread may call it."""

    def __init__(self, own: OwnLabels, registry: CollectorRegistry) -> None:
        ended = Counter(
            "transom_kv_transfers",
            "Transfers of a cached prefix between this worker and another one that ended. Into this worker (in): "
            "fetched, present (it had everything by then), not_found (the other one had evicted it), no_space (in "
            "the host tier), refused, timeout, source_lost, cancelled (the request ended before) or failed. Out of "
            "it (out): read, expired (the other worker fell silent), refused or not_found.",
            (*own.names, "direction", "outcome"),
            registry=registry,
        )
        moved = Counter(
            "transom_kv_transfer_bytes",
            "Bytes of KV blocks that came from other workers (in) or were read for them (out).",
            (*own.names, "direction"),
            registry=registry,
        )
        full_length = Counter(
            "transom_kv_transfer_full_length_bytes",
            "Bytes that the transfers into this worker would have had with all tokens of window groups.",
            own.names,
            registry=registry,
        )
        seconds = Histogram(
            "transom_kv_transfer_seconds",
            "Seconds that a request was held while its prefix came from another worker, for all outcomes.",
            own.names,
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._ended = {of: ended.labels(*own.values, *of) for of in OUTCOMES}
        self._moved = {direction: moved.labels(*own.values, direction) for direction in ("in", "out")}
        self._full_length, self._seconds = full_length.labels(*own.values), seconds.labels(*own.values)

    def fetched(self, report: FetchReport) -> None:
        """A fetch has ended."""
        self._ended["in", report.outcome].inc()
        self._moved["in"].inc(report.num_bytes)
        self._full_length.inc(report.full_length_bytes)
        self._seconds.observe(report.seconds)

    def exported(self, outcome: ExportOutcome) -> None:
        """An export has ended, or was refused."""
        self._ended["out", outcome].inc()

    def sent(self, num_bytes: int) -> None:
        """Bytes of blocks were read for another worker."""
        self._moved["out"].inc(num_bytes)
