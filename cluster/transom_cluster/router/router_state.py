"""What a router's connections and line say for its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from transom_cluster.router.worker_connection import WorkerConnection
from transom_cluster.routing.autoscaling import wanted_replicas
from transom_cluster.telemetry.router_state import RouterState
from transom_worker.config import AutoscalingConfig

STATES = ("open", "closed", "draining")


def read_state(
    connections: Mapping[str, WorkerConnection], queue: Sized, autoscaling: AutoscalingConfig | None
) -> RouterState:
    """The state now. With `autoscaling`, what its policy makes of the last load of each worker that is there."""
    by_state = dict.fromkeys(STATES, 0)
    for connection in connections.values():
        by_state[connection.state] += 1
    desired = None
    if autoscaling is not None:
        present = [connection for connection in connections.values() if not connection.is_draining]
        loads = [connection.load for connection in present if connection.load is not None]
        desired = wanted_replicas(loads, num_unplaced=len(queue), num_target=len(present), config=autoscaling)
    return RouterState(
        num_waiting=len(queue),
        workers_by_state=by_state,
        in_flight_by_worker={worker_id: len(connection.in_flight) for worker_id, connection in connections.items()},
        desired_workers=desired,
    )
