"""Metrics of a router's placements: chosen workers, predicted and actual prefix hits, the time that a placement takes, and the
router's mirrors of the workers' prefix indexes."""

from transom_cluster.routing.placer import PlacementObserver
from transom_cluster.routing.policy import REASONS, Reason
from transom_cluster.routing.worker_view import HitTokens
from transom_core.config import RoutingPolicy
from transom_core.telemetry.metric_families import MetricFamilies

ERROR_BUCKETS_TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)
PLACEMENT_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25)


class RoutingMetrics(PlacementObserver):
    """Counts what one router's placer reports."""

    def __init__(self, families: MetricFamilies) -> None:
        self._placements = families.counter(
            "transom_router_placements",
            "Requests sent to a worker, by reason (docs/routing.md): only_one, longest_hit, least_loaded, home, random "
            "or turn.",
            "policy",
            "worker",
            "reason",
        )
        self._placement_s = families.histogram(
            "transom_router_placement_seconds",
            "Time that the router took to choose a worker, hashing the prompt included.",
            PLACEMENT_BUCKETS_S,
        ).of()
        self._predicted_tokens = families.counter(
            "transom_router_predicted_hit_tokens",
            "Prompt tokens that the router predicted to be cached, of requests whose output has begun: on the worker's "
            "device, its host tier, its disk tier, or a peer (another worker).",
            "tier",
            values=HitTokens._fields,
        )
        self._actual_tokens = families.counter(
            "transom_router_actual_hit_tokens",
            "Prompt tokens that the workers found cached, of requests whose output has begun.",
            "tier",
            values=HitTokens._fields,
        )
        self._error_tokens = families.histogram(
            "transom_router_hit_error_tokens",
            "Difference between predicted and actual hit in prompt tokens.",
            ERROR_BUCKETS_TOKENS,
        ).of()
        self._resyncs = families.counter(
            "transom_router_resyncs",
            "Gaps in a worker's index updates, after which the router asked for the whole index.",
            "worker",
        )
        self._mirror_blocks = families.gauge(
            "transom_router_mirror_blocks",
            "Blocks in the router's mirror of a worker's prefix index, those on its disk included.",
            "worker",
        )
        self._mirror_version = families.gauge(
            "transom_router_mirror_version", "Version of the router's mirror of a worker's prefix index.", "worker"
        )

    def joined(self, policy: RoutingPolicy, worker: str) -> None:
        """Put a worker's series on the page, with 0. If the series are there already, their counts continue."""
        for reason in REASONS[policy]:
            self._placements.of(policy, worker, reason)
        self._resyncs.of(worker)

    def placed(self, policy: RoutingPolicy, worker: str, reason: Reason, *, cost_s: float) -> None:
        """Count a placement: the policy chose a worker for a request, which took the router `cost_s` seconds."""
        self._placements.of(policy, worker, reason).inc()
        self._placement_s.observe(cost_s)

    def hit_measured(self, *, predicted: HitTokens, actual: HitTokens) -> None:
        """Count predicted and actual hit tokens of a request whose first output has come."""
        for tier in HitTokens._fields:
            self._predicted_tokens.of(tier).inc(getattr(predicted, tier))
            self._actual_tokens.of(tier).inc(getattr(actual, tier))
        self._error_tokens.observe(abs(predicted.total - actual.total))

    def mirror_changed(self, worker: str, *, num_blocks: int, version: int) -> None:
        """Set the size and version of a worker's index mirror, which has changed."""
        self._mirror_blocks.of(worker).set(num_blocks)
        self._mirror_version.of(worker).set(version)

    def mirror_reset(self, worker: str) -> None:
        """Count a mirror that missed an update, so that the router asks the worker for its whole index."""
        self._resyncs.of(worker).inc()

    def forget(self, policy: RoutingPolicy, worker: str) -> None:
        """Remove the series of a worker that has left or was lost."""
        for reason in REASONS[policy]:
            self._placements.forget(policy, worker, reason)
        for family in (self._resyncs, self._mirror_blocks, self._mirror_version):
            family.forget(worker)
