"""Where requests were sent, what was predicted of them, what that cost, and what the mirrors hold."""

from __future__ import annotations

from transom_cluster.routing.placement_observer import PlacementObserver
from transom_cluster.routing.policy import REASONS, Reason
from transom_cluster.telemetry.metric_families import RouterFamilies
from transom_worker.config import RoutingPolicy

ERROR_BUCKETS_TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)
PLACEMENT_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25)


class RoutingMetrics(PlacementObserver):
    """One router's metrics of its choices."""

    def __init__(self, families: RouterFamilies) -> None:
        self._placements = families.counter(
            "transom_router_placements",
            "Requests sent to a worker, by the policy that chose it and why: only_one (no other could take it), longest_hit, "
            "least_loaded, home (where the prompt always goes among workers that are as good), random or turn.",
            "policy",
            "worker",
            "reason",
        )
        self._placement_s = families.histogram(
            "transom_router_placement_seconds",
            "What it cost the router to choose a worker, hashing the prompt included.",
            PLACEMENT_BUCKETS_S,
        ).of()
        self._predicted_tokens = families.counter(
            "transom_router_predicted_hit_tokens",
            "Prompt tokens that the mirrors said were cached, of requests whose answers have begun.",
        ).of()
        self._actual_tokens = families.counter(
            "transom_router_actual_hit_tokens", "Prompt tokens that the workers found cached, of the same requests."
        ).of()
        self._error_tokens = families.histogram(
            "transom_router_hit_error_tokens",
            "Prompt tokens between predicted and actual hit: the index changed in between.",
            ERROR_BUCKETS_TOKENS,
        ).of()
        self._resyncs = families.counter(
            "transom_router_resyncs",
            "Gaps in a worker's index updates, after which the whole index was asked for.",
            "worker",
        )
        self._mirror_blocks = families.gauge(
            "transom_router_mirror_blocks", "Blocks in the mirror of a worker's prefix index.", "worker"
        )
        self._mirror_version = families.gauge(
            "transom_router_mirror_version", "Version of the mirror of a worker's prefix index.", "worker"
        )

    def joined(self, policy: RoutingPolicy, worker: str) -> None:
        """A worker takes requests: its counts begin, or go on."""
        for reason in REASONS[policy]:
            self._placements.of(policy, worker, reason)
        self._resyncs.of(worker)

    def placed(self, policy: RoutingPolicy, worker: str, reason: Reason, *, cost_s: float) -> None:
        """A request was sent to a worker."""
        self._placements.of(policy, worker, reason).inc()
        self._placement_s.observe(cost_s)

    def compared(self, *, predicted: int, actual: int) -> None:
        """An answer has begun."""
        self._predicted_tokens.inc(predicted)
        self._actual_tokens.inc(actual)
        self._error_tokens.observe(abs(predicted - actual))

    def mirrored(self, worker: str, *, num_blocks: int, version: int) -> None:
        """A mirror has changed."""
        self._mirror_blocks.of(worker).set(num_blocks)
        self._mirror_version.of(worker).set(version)

    def resync(self, worker: str) -> None:
        """A mirror has lost its way."""
        self._resyncs.of(worker).inc()

    def forget(self, policy: RoutingPolicy, worker: str) -> None:
        """A worker is gone: what was told of it alone ends."""
        for reason in REASONS[policy]:
            self._placements.forget(policy, worker, reason)
        for family in (self._resyncs, self._mirror_blocks, self._mirror_version):
            family.forget(worker)
