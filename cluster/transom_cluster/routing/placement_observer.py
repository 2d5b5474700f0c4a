"""What the placer reports: `PlacementObserver` ignores every report, and subclasses count what they need.

The placer itself stays free of metrics libraries, so that benchmarks and simulations run it alone.
"""

from __future__ import annotations

from transom_cluster.routing.policy import Reason
from transom_worker.config import RoutingPolicy


class PlacementObserver:
    """Receives the reports of one placer. Every method does nothing here."""

    def joined(self, policy: RoutingPolicy, worker: str) -> None:
        """A worker takes requests: its counts begin, or go on."""

    def placed(self, policy: RoutingPolicy, worker: str, reason: Reason, *, cost_s: float) -> None:
        """A request was sent to a worker; choosing the worker took the router `cost_s`."""

    def compared(self, *, predicted: int, actual: int) -> None:
        """The first output of a request came: the prompt tokens that were predicted to be cached, and those that were."""

    def mirrored(self, worker: str, *, num_blocks: int, version: int) -> None:
        """The mirror of a worker's prefix index changed."""

    def resync(self, worker: str) -> None:
        """A mirror missed an update, and the router asks the worker for its whole index."""

    def forget(self, policy: RoutingPolicy, worker: str) -> None:
        """A worker is gone: the series that describe it alone end."""
