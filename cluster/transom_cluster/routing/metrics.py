"""Where requests were sent, what was predicted of them, and what the mirrors hold."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ERROR_BUCKETS_TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)


class RoutingMetrics:
    """One router's metrics of its choices, in the router's registry."""

    def __init__(self, registry: CollectorRegistry, router: str) -> None:
        self._router = router
        self._placements = Counter(
            "transom_router_placements",
            "Requests sent to a worker, by the policy that chose it.",
            ("router", "policy", "worker"),
            registry=registry,
        )
        self._predicted_tokens = Counter(
            "transom_router_predicted_hit_tokens",
            "Prompt tokens that the mirrors said were cached, of requests whose answers have begun.",
            ("router",),
            registry=registry,
        ).labels(router)
        self._actual_tokens = Counter(
            "transom_router_actual_hit_tokens",
            "Prompt tokens that the workers found cached, of the same requests.",
            ("router",),
            registry=registry,
        ).labels(router)
        self._error_tokens = Histogram(
            "transom_router_hit_error_tokens",
            "Prompt tokens between predicted and actual hit: the index changed in between.",
            ("router",),
            buckets=ERROR_BUCKETS_TOKENS,
            registry=registry,
        ).labels(router)
        self._resyncs = Counter(
            "transom_router_resyncs",
            "Gaps in a worker's index updates, after which the whole index was asked for.",
            ("router", "worker"),
            registry=registry,
        )
        self._mirror_blocks = Gauge(
            "transom_router_mirror_blocks",
            "Blocks in the mirror of a worker's prefix index.",
            ("router", "worker"),
            registry=registry,
        )
        self._mirror_version = Gauge(
            "transom_router_mirror_version",
            "Version of the mirror of a worker's prefix index.",
            ("router", "worker"),
            registry=registry,
        )

    def placed(self, policy: str, worker: str) -> None:
        """A request was sent to a worker."""
        self._placements.labels(self._router, policy, worker).inc()

    def compared(self, *, predicted: int, actual: int) -> None:
        """An answer has begun."""
        self._predicted_tokens.inc(predicted)
        self._actual_tokens.inc(actual)
        self._error_tokens.observe(abs(predicted - actual))

    def mirrored(self, worker: str, *, num_blocks: int, version: int) -> None:
        """A mirror has changed."""
        self._mirror_blocks.labels(self._router, worker).set(num_blocks)
        self._mirror_version.labels(self._router, worker).set(version)

    def resync(self, worker: str) -> None:
        """A mirror has lost its way."""
        self._resyncs.labels(self._router, worker).inc()

    def forget(self, policy: str, worker: str) -> None:
        """A worker is gone: what was told of it alone ends."""
        self._placements.remove(self._router, policy, worker)
        for metric in (self._resyncs, self._mirror_blocks, self._mirror_version):
            metric.remove(self._router, worker)
