"""Ray Serve's request router for workers: it sends each call to the worker replica that the call names.

A caller names the replica with `handle.options(session_id=worker_id)`. Serve pickles this module's class by value, so state that
the whole process shares cannot be in this module; it is in `serve.running_replicas`, which this module imports.
"""

from typing import Any
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from transom_cluster.serve.running_replicas import running_replicas_of
from transom_core.errors import WorkerLost


class ReplicaRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a call to the replica whose id is the call's session id, or fails the call at once. A call without a session id waits
    for any replica.

    A draining replica still takes calls while a `ServeWorkerClient` holds its `RunningReplica`. Unlike Serve's own request routers,
    this class asks no replica for its queue length and queues no calls: Transom's router has chosen the worker, and the worker
    refuses requests over its limit.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Initialise the object. Serve calls this method instead of `__init__`."""
        self._reachable: WeakValueDictionary[str, RunningReplica] = WeakValueDictionary()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Publish the running replicas, which Serve reports here, to this process's worker directory."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that a call found dead. Serve's controller notices it only at its next health check."""
        super().on_replica_actor_died(replica_id)
        self._reachable.pop(replica_id.unique_id, None)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas as candidates, for a call that names none."""
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return the replica that the call names.

        This overrides a private method, as Ray's own `experimental.capacity_queue_router` does. The public `choose_replicas` cannot
        fail a call, because Serve calls it until there is a candidate. Besides, Ray before 2.60 loses calls of request routers that
        are not FIFO when several calls are placed at once.

        Raises:
            WorkerLost: the replica is unknown or gone, or it did not take the call.
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
