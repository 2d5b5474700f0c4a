"""The router's own Prometheus metrics, with a `router` label and buckets that suit language models."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from transom_cluster.routing.metrics import RoutingMetrics

REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class RouterMetrics:
    """One router's metrics, in a registry of its own."""

    def __init__(self, router: str) -> None:
        self.registry = CollectorRegistry()
        self.routing = RoutingMetrics(self.registry, router)
        self._router = router
        self._requests = Counter(
            "transom_router_requests",
            "HTTP requests by endpoint and status (499: the client left).",
            ("router", "endpoint", "status"),
            registry=self.registry,
        )
        self._request_s = Histogram(
            "transom_router_request_seconds",
            "From a request's arrival to the end of its answer.",
            ("router", "endpoint"),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.first_token_s = Histogram(
            "transom_router_first_token_seconds",
            "From a request's arrival to the first token of each choice.",
            ("router",),
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self.registry,
        ).labels(router)
        self.inter_token_s = Histogram(
            "transom_router_inter_token_seconds",
            "Between two events of one choice.",
            ("router",),
            buckets=INTER_TOKEN_BUCKETS_S,
            registry=self.registry,
        ).labels(router)
        self.open_streams = Gauge(
            "transom_router_open_streams",
            "Streamed answers that are being sent.",
            ("router",),
            registry=self.registry,
        ).labels(router)
        self.dropped_scrapes = Counter(
            "transom_router_dropped_scrapes",
            "Workers whose metrics were left out of a page because they did not answer in time.",
            ("router",),
            registry=self.registry,
        ).labels(router)

    def finished(self, endpoint: str, status: int, elapsed_s: float) -> None:
        """An HTTP request has ended."""
        self._requests.labels(self._router, endpoint, str(status)).inc()
        self._request_s.labels(self._router, endpoint).observe(elapsed_s)

    def text(self) -> str:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry).decode()
