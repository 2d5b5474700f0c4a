"""How Ray Serve sends a call to the worker that the call names (`handle.options(session_id=worker_id)`).

Serve pickles this module's class by value, so that process-wide state lives in `serve_directory`, which it imports by name.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from transom_cluster.serve.worker_directory import running_replicas_of
from transom_worker.errors import WorkerLost


class ReplicaRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Calls go to the replica whose id is their session id, or fail at once; calls that name none wait for any replica.

    A replica that drains takes calls as long as somebody holds its `RunningReplica`, as a `ServeWorkerClient` does. Nothing is
    asked about queue lengths and nothing waits: the router chose the worker, and the worker refuses what is too much.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve's hook for what `__init__` would do."""
        self._reachable: WeakValueDictionary[str, RunningReplica] = WeakValueDictionary()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells which replicas run; the process learns it through the directory."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found a replica dead: sooner than Serve's controller, which looks once per health check period."""
        super().on_replica_actor_died(replica_id)
        self._reachable.pop(replica_id.unique_id, None)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Any replica, for calls that name none."""
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that the call names.

        Serve has no public way to fail a call here: `choose_replicas` is asked again and again until there is a candidate.

        Raises:
            WorkerLost: the replica is unknown, gone, or did not take the call.
        """
        worker_id = pending_request.metadata.session_id
        if not worker_id:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        replica = None if is_retry else self._reachable.get(worker_id)
        if replica is None:
            raise WorkerLost(f"Worker {worker_id} is gone.")
        return replica

    def _publish(self) -> None:
        running = {replica_id.unique_id: replica for replica_id, replica in self.curr_replicas.items()}
        self._reachable.update(running)
        running_replicas_of(self._deployment_id.name, self._deployment_id.app_name).publish(running)
