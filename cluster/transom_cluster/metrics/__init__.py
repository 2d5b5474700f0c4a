"""A router's own Prometheus metrics, and the pages over HTTP: its own, everybody's, and who there is to scrape."""

from transom_cluster.metrics.router_metrics import RouterMetrics

__all__ = ["RouterMetrics"]
