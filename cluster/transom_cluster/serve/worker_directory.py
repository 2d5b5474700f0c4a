"""Which workers there are, as Ray Serve's controller tells this process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.serve.worker_client import ServeWorkerClient


class RunningReplicas:
    """The running replicas of one deployment by worker id. Published on Serve's own event loop, read on ours."""

    def __init__(self) -> None:
        self.replicas: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def publish(self, replicas: Mapping[str, Any]) -> None:
        """These run now; from any thread."""
        with self._lock:
            if replicas.keys() == self.replicas.keys():
                return
            self.replicas = replicas
            for changed, loop in self._listeners.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event that is set at every change."""
        changed = asyncio.Event()
        with self._lock:
            self._listeners[changed] = asyncio.get_running_loop()
        try:
            yield changed
        finally:
            with self._lock:
                del self._listeners[changed]


_presences: dict[tuple[str, str], RunningReplicas] = {}
_presences_lock = threading.Lock()


def running_replicas_of(deployment: str, app: str) -> RunningReplicas:
    """The one of this process, which Serve's request router publishes to and directories read."""
    with _presences_lock:
        return _presences.setdefault((deployment, app), RunningReplicas())


class ServeWorkerDirectory:
    """Implements `WorkerDirectory` for a worker deployment whose calls go through `ReplicaRequestRouter`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._waking: asyncio.Task[None] | None = None

    async def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """See `WorkerDirectory`."""
        self._handle.options(method_name="info")  # from here on Serve follows the replicas
        clients: dict[str, ServeWorkerClient] = {}
        presence = running_replicas_of(self._handle.deployment_name, self._handle.app_name)
        with presence.listening() as changed:
            while True:
                changed.clear()
                clients = {
                    worker_id: clients.get(worker_id) or ServeWorkerClient(self._handle, worker_id, replica)
                    for worker_id, replica in presence.replicas.items()
                }
                yield dict(clients)
                await changed.wait()

    def wake(self) -> None:
        """See `WorkerDirectory`. A call that waits for any replica is what Serve's autoscaler starts one for."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wait_for_any(), context=contextvars.Context())

    async def _wait_for_any(self) -> None:
        with contextlib.suppress(Exception):  # the app is going away, or the replica went: whoever waits will ask again
            await self._handle.info.remote()
