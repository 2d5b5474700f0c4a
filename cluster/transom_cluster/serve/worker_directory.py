"""Tells a router which worker replicas run now, as Ray Serve's controller reports them to this process.

Serve's request router (`serve.replica_router`) publishes the running replicas on Serve's event loop. `ServeWorkerDirectory` reads
them on the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.serve.serve_worker_client import ServeWorkerClient


class RunningReplicas:
    """The running replicas of one deployment by worker id. One thread publishes them, event loops of other threads read them."""

    def __init__(self) -> None:
        self.replicas: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._subscribers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def publish(self, replicas: Mapping[str, Any]) -> None:
        """Replace the running replicas and wake the subscribers. Any thread may call this."""
        with self._lock:
            if replicas.keys() == self.replicas.keys():
                return
            self.replicas = replicas
            for changed, loop in self._subscribers.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)

    @contextlib.contextmanager
    def subscribed(self, changed: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """Provide an event that is set at every change, on the caller's event loop; `changed` if the caller has one."""
        changed = changed or asyncio.Event()
        with self._lock:
            self._subscribers[changed] = asyncio.get_running_loop()
        try:
            yield changed
        finally:
            with self._lock:
                del self._subscribers[changed]


_by_deployment: dict[tuple[str, str], RunningReplicas] = {}
_by_deployment_lock = threading.Lock()


def running_replicas_of(deployment: str, app: str) -> RunningReplicas:
    """This process's `RunningReplicas` of a deployment, shared by the publisher and all readers."""
    with _by_deployment_lock:
        return _by_deployment.setdefault((deployment, app), RunningReplicas())


class ServeWorkerDirectory:
    """Implements `WorkerDirectory` for worker deployments whose calls go through `ReplicaRequestRouter`; the first one of them can
    be scaled to nothing, and woken."""

    def __init__(self, handle: Any, *others: Any) -> None:
        self._handle = handle
        self._handles = (handle, *others)
        self._wake_task: asyncio.Task[None] | None = None

    async def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """Yield the clients of all running workers, again at every change, as `WorkerDirectory` says."""
        clients: dict[str, ServeWorkerClient] = {}
        changed = asyncio.Event()
        sources = []
        for handle in self._handles:
            handle.options(method_name="info")  # makes Serve start to report replicas to this process
            sources.append((handle, running_replicas_of(handle.deployment_name, handle.app_name)))
        with contextlib.ExitStack() as subscriptions:
            for _, running in sources:
                subscriptions.enter_context(running.subscribed(changed))
            while True:
                changed.clear()
                clients = {
                    worker_id: clients.get(worker_id) or ServeWorkerClient(handle, worker_id, replica)
                    for handle, running in sources
                    for worker_id, replica in running.replicas.items()
                }
                yield dict(clients)
                await changed.wait()

    def wake(self) -> None:
        """Have a worker started if there is none: Serve's autoscaler starts a replica for a call that waits for any replica."""
        if self._wake_task is None or self._wake_task.done():
            self._wake_task = asyncio.create_task(self._wait_for_any(), context=contextvars.Context())

    async def _wait_for_any(self) -> None:
        with contextlib.suppress(Exception):  # the app is stopping, or the replica died; the router calls `wake` again
            await self._handle.info.remote()
