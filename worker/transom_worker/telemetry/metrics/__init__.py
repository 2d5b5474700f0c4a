"""A worker's Prometheus metrics: requests, tokens, steps, ranks, and every block by group and state.

Histograms and counters of requests, tokens and steps are updated as the engine's events arrive, on its thread. All other values are
read from the last published `WorkerState` at a scrape, so that a step pays nothing for them. Any thread may scrape.
"""

from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics

__all__ = ["EngineMetrics"]
