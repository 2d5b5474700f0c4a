"""Ray Serve's request router for workers: it sends each call to the worker replica that the call names.

A caller names the replica by `handle.options(session_id=worker_id)`. Serve pickles this module's class by value, so the state of
the process lives in `serve.running_replicas`, which this module imports by name.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from transom_cluster.serve.running_replicas import RunningReplicas, gone, running_replicas_of


class ReplicaRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a call to the replica whose id is the call's session id, or fails it. A call without one waits for any replica.

    A replica that drains is no longer among those that Serve reports. It stays among those of this class, and takes calls, while
    its `ServeWorkerClient` exists.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Initialise; Serve calls this instead of `__init__`."""
        self._running: dict[str, RunningReplica] = {}  # as Serve reported last, by worker id
        self._failed: set[str] = set()  # workers that a call could not reach, and that is tried again

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the running replicas that Serve reports, and keep those that drain and have a client."""
        self._running = {replica.replica_id.unique_id: replica for replica in replicas}
        gone_or_draining = [
            (replica_id, replica)
            for replica_id, replica in self.curr_replicas.items()
            if replica_id.unique_id not in self._running
        ]
        draining = [replica for replica_id, replica in gone_or_draining if _has_client(replica_id)]
        super().update_replicas([*replicas, *draining])
        for replica_id in [*(one.replica_id for one in replicas), *(one for one, _ in gone_or_draining)][:1]:
            self._publish(replica_id)  # of the only deployment that this router has

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that a call found dead. Serve's controller would notice only at its next health check."""
        super().on_replica_actor_died(replica_id)
        self._running.pop(replica_id.unique_id, None)
        self._publish(replica_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Have the call that did not reach the replica fail when Serve tries it again: the replica may have taken it."""
        super().on_replica_actor_unavailable(replica_id)
        self._failed.add(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that the call names; all that run, for a call that names none.

        Serve has no result for "none ever": it asks again until there is a candidate. So this ends a call to a replica that is
        gone itself, and Serve drops calls that have ended when it has candidates for them.
        """
        worker_id = "" if pending_request is None else pending_request.metadata.session_id
        if pending_request is None or not worker_id:
            return [list(self._running.values())]
        named = [one for one in candidate_replicas if one.replica_id.unique_id == worker_id]
        if named and worker_id not in self._failed:
            return [named]
        self._failed.discard(worker_id)
        if not pending_request.future.done():
            pending_request.future.set_exception(gone(worker_id))
        return [candidate_replicas]

    def _publish(self, replica_id: ReplicaID) -> None:
        """Tell the process's worker directory which replicas run, and which ones calls can reach."""
        _replicas_of(replica_id).publish(self._running, {one.unique_id for one in self.curr_replicas})


def _has_client(replica_id: ReplicaID) -> bool:
    return replica_id.unique_id in _replicas_of(replica_id).clients


def _replicas_of(replica_id: ReplicaID) -> RunningReplicas:
    """This process's record of the replicas of a replica's deployment."""
    return running_replicas_of(replica_id.deployment_id.name, replica_id.deployment_id.app_name)
