"""What a router's links and line say for its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from transom_cluster.router.worker_connection import WorkerLink
from transom_cluster.routing.autoscaling import wanted_replicas
from transom_cluster.telemetry.router_state import RouterState
from transom_worker.config import AutoscalingConfig

STATES = ("open", "closed", "draining")


def read_state(links: Mapping[str, WorkerLink], room: Sized, autoscaling: AutoscalingConfig | None) -> RouterState:
    """The state now. With `autoscaling`, what its policy makes of the last load of each worker that is there."""
    by_state = dict.fromkeys(STATES, 0)
    for link in links.values():
        by_state[link.state] += 1
    desired = None
    if autoscaling is not None:
        present = [link for link in links.values() if not link.is_draining]
        loads = [link.load for link in present if link.load is not None]
        desired = wanted_replicas(loads, num_unplaced=len(room), num_target=len(present), config=autoscaling)
    return RouterState(
        num_waiting=len(room),
        workers_by_state=by_state,
        in_flight_by_worker={worker_id: len(link.in_flight) for worker_id, link in links.items()},
        desired_workers=desired,
    )
