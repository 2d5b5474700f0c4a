"""The router's own Prometheus metrics, with a `router` label and buckets that suit language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
        self._failovers = Counter(
            "transom_router_failovers",
            "Requests whose worker was lost, by outcome: resumed elsewhere, gave_up, or stopped as poison.",
            ("router", "outcome"),
            registry=self.registry,
        )
        self._drains = Counter(
            "transom_router_drains",
            "Workers that disappeared, by outcome: finished what ran there, or moved what had not ended in time.",
            ("router", "outcome"),
            registry=self.registry,
        )
        self._waiting_requests = Gauge(
            "transom_router_waiting_requests",
            "Requests that no worker has.",
            ("router",),
            registry=self.registry,
        ).labels(router)
        self._workers = Gauge(
            "transom_router_workers",
            "Workers by state: open, closed (starting or lost), draining.",
            ("router", "state"),
            registry=self.registry,
        )
        for outcome in ("resumed", "gave_up", "poison"):
            self._failovers.labels(router, outcome)
        for outcome in ("finished", "moved"):
            self._drains.labels(router, outcome)

    def failover(self, outcome: str) -> None:
        """A request whose worker was lost has gone on (resumed) or not."""
        self._failovers.labels(self._router, outcome).inc()

    def drained(self, *, num_moved: int) -> None:
        """A worker that disappeared has nothing to do any more."""
        self._drains.labels(self._router, "moved" if num_moved else "finished").inc()

    def watch(self, num_waiting: Callable[[], int], num_workers: Mapping[str, Callable[[], int]]) -> None:
        """Where to look, at every scrape, for requests that wait and for workers by state."""
        self._waiting_requests.set_function(num_waiting)
        for state, count in num_workers.items():
            self._workers.labels(self._router, state).set_function(count)

    def finished(self, endpoint: str, status: int, elapsed_s: float) -> None:
        """An HTTP request has ended."""
        self._requests.labels(self._router, endpoint, str(status)).inc()
        self._request_s.labels(self._router, endpoint).observe(elapsed_s)

    def text(self) -> str:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry).decode()
