"""A worker's Prometheus metrics: requests, tokens, steps, ranks, and every block by group and state.

Histograms and counters of the hot path are fed as things happen, by the engine's thread. All else is read from the last published
`WorkerState` when somebody scrapes, so that a step pays nothing for it. Any thread may scrape.
"""

from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics
from transom_worker.telemetry.metrics.identity import build_versions
from transom_worker.telemetry.metrics.request_times import RequestTimes
from transom_worker.telemetry.metrics.state import WorkerState

__all__ = ["EngineMetrics", "RequestTimes", "WorkerState", "build_versions"]
