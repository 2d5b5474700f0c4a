"""`WorkerPool`: keeps a connection to each worker of the directory. It opens one when a worker appears, and drains it when the
worker disappears.

- **directory**: the list of the workers that exist, from Ray Serve (`WorkerDirectory`).
- **drain**: a worker that the directory no longer lists gets no new requests. Its requests may end within `RouterTimings.drain_s`;
  the rest migrates. If no other worker has its model, they may stay for up to `RouterTimings.last_drain_s`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_client import WorkerClient, WorkerDirectory, describe_worker
from transom_cluster.router.worker_connection import WorkerConnection
from transom_cluster.router.worker_events import WorkerEvents
from transom_cluster.telemetry.router_metrics import RouterMetrics

logger = logging.getLogger("transom.router")


def describe_connection(connection: WorkerConnection) -> dict[str, Any]:
    """Describe a worker and its connection as JSON values, for the list of workers at `/`."""
    return {
        "id": connection.worker_id,
        "state": connection.state,
        "requests": len(connection.in_flight),
        "load": None if connection.load is None else asdict(connection.load),
        **({} if connection.info is None else describe_worker(connection.info)),
    }


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerPool:
    """Keeps `connections` in agreement with the directory. Runs on one event loop."""

    directory: WorkerDirectory
    router_id: str
    connections: dict[str, WorkerConnection]
    events: WorkerEvents
    metrics: RouterMetrics
    timings: RouterTimings
    tokenizer: str  # digest of the router's tokenizer; workers with another one get no requests
    _present: Mapping[str, WorkerClient] = field(default_factory=dict, init=False)  # the directory's last list
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)
    # Worker id -> the task that follows its connection.
    _followers: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    def start(self) -> None:
        """Begin to watch the directory."""
        self._tasks.spawn(self._watch_directory())

    async def stop(self) -> None:
        """Close all connections; their requests are handled as lost."""
        for connection in self.connections.values():
            connection.is_draining = connection.is_closing = True
        await self._tasks.cancel()
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))
        self.connections.clear()

    async def _watch_directory(self) -> None:
        while True:
            try:
                async for present in self.directory.changes():
                    self._update(present)
            except Exception as error:
                logger.warning("The directory of workers failed: %r", error)
            await asyncio.sleep(self.timings.directory_retry_s)

    def _update(self, present: Mapping[str, WorkerClient]) -> None:
        self._present = dict(present)
        for worker_id, client in present.items():
            if worker_id not in self.connections:
                self._add(worker_id, client)
        for worker_id, connection in self.connections.items():
            if worker_id not in present and not connection.is_draining:
                connection.is_draining = True
                self._tasks.spawn(self._drain(connection))

    def _has_another(self, identity: str) -> bool:
        """Return whether requests of this identity need not wait at a draining worker: another worker can continue them, or no
        worker of any identity takes requests."""
        others = [one for one in self.connections.values() if one.takes_requests]
        return not others or any(one.identity == identity for one in others)

    def _add(self, worker_id: str, client: WorkerClient) -> None:
        connection = WorkerConnection(worker_id, client, self.router_id, self.timings, tokenizer=self.tokenizer)
        self.connections[worker_id] = connection
        self._followers[worker_id] = self._tasks.spawn(self.events.follow(connection))
        logger.info("Worker %s has appeared.", worker_id)

    async def _drain(self, connection: WorkerConnection) -> None:
        """Drain a connection, have its remaining requests migrate, and close it.

        A worker that still answers at the end has drained; any other worker was lost, and its follower handles the loss.
        """
        logger.info("Worker %s has disappeared (%d requests).", connection.worker_id, len(connection.in_flight))
        moved = await connection.drain(has_another=lambda: self._has_another(connection.identity))
        if moved.requests:
            request_ids = [request.attempt.request_id for request in moved.requests]
            self.events.handle(connection, moved)
            with contextlib.suppress(TimeoutError):  # a call to a lost host never returns
                async with asyncio.timeout(self.timings.last_call_timeout_s):
                    await connection.abort(request_ids)
        has_drained = connection.is_open and await _answers(connection, timeout_s=self.timings.last_call_timeout_s)
        connection.is_closing = has_drained
        follower = self._followers.pop(connection.worker_id)
        follower.cancel()
        await asyncio.wait((follower,))
        await connection.close()
        if has_drained:
            self.metrics.drains.of("moved" if moved.requests else "finished").inc()
        del self.connections[connection.worker_id]
        if (client := self._present.get(connection.worker_id)) is not None:  # the directory lists it again
            self._add(connection.worker_id, client)


async def _answers(connection: WorkerConnection, *, timeout_s: float) -> bool:
    """Return whether a worker that the directory no longer lists still answers a call. If so, it drains; if not, it was lost.

    The directory drops workers that died as well as those that leave, sometimes before the stream breaks. A worker that leaves runs
    until all its routers have closed their streams, so all routers get the same result.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await connection.client.info()
    except Exception as error:
        logger.warning("Worker %s was lost while it drained: %r", connection.worker_id, error)
        return False
    return connection.is_open
