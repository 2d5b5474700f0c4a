"""What a placer reports of its decisions: `PlacementObserver` ignores every report, and subclasses count what they need.

The placer itself imports no metrics library, so that benchmarks and simulations can run it alone.
"""

from __future__ import annotations

from transom_cluster.routing.policy import Reason
from transom_cluster.routing.worker_view import HitTokens
from transom_core.config import RoutingPolicy


class PlacementObserver:
    """Receives the reports of one placer. Every method of this class does nothing."""

    def joined(self, policy: RoutingPolicy, worker: str) -> None:
        """A worker takes requests from now on; its counts begin, or continue where it was connected before."""

    def placed(self, policy: RoutingPolicy, worker: str, reason: Reason, *, cost_s: float) -> None:
        """The policy chose a worker for a request; the choice took the router `cost_s`."""

    def hit_measured(self, *, predicted: HitTokens, actual: HitTokens) -> None:
        """The first output of a request has come, with the prompt tokens that the worker found in its prefix cache."""

    def mirror_changed(self, worker: str, *, num_blocks: int, version: int) -> None:
        """The mirror of a worker's prefix index changed."""

    def mirror_reset(self, worker: str) -> None:
        """A mirror missed an update; the router asks the worker for its whole index."""

    def forget(self, policy: RoutingPolicy, worker: str) -> None:
        """A worker has left or was lost: the metric series with its label end."""
