"""Renders the metrics of one process as a page."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from transom_core.config import MetricsCompat
from transom_core.telemetry.genai_names import WithGenAiNames, wants_latest_names
from transom_core.telemetry.vllm_names import WithVllmNames


def metrics_page(collector: Collector, *, openmetrics: bool = False, compat: MetricsCompat = "none") -> bytes:
    """Return the page in Prometheus' text format, or in the OpenMetrics format, which has exemplars. `compat` adds the names of
    another server, the environment may add OpenTelemetry's."""
    shown = collector if compat == "none" else WithVllmNames(collector)
    if wants_latest_names():
        shown = WithGenAiNames(shown)
    if not openmetrics:
        return generate_latest(shown)
    # With the library's default instead of `ALLOWUTF8`, this page would have vllm_x for vllm:x.
    page: bytes = generate_openmetrics(shown, ALLOWUTF8)  # type: ignore[no-untyped-call]
    return page
