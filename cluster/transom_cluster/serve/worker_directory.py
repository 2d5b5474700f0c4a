"""`ServeWorkerDirectory`: tells a router which worker replicas run now, from `serve.running_replicas` of all worker deployments."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.serve.running_replicas import running_replicas
from transom_cluster.serve.serve_worker_client import ServeWorkerClient


class ServeWorkerDirectory:
    """Implements `WorkerDirectory` for worker deployments whose calls go through `ReplicaRequestRouter`. Only the first deployment
    can be scaled to zero, so `wake` starts a replica of this one."""

    def __init__(self, handle: Any, *others: Any) -> None:
        self._handle = handle
        self._handles = (handle, *others)
        self._wake_task: asyncio.Task[None] | None = None

    async def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """Yield the clients of all running workers by id, at once and again at every change."""
        clients: dict[str, ServeWorkerClient] = {}
        async with contextlib.aclosing(running_replicas(self._handles)) as changes:
            async for present in changes:
                clients = {
                    worker_id: clients.get(worker_id) or ServeWorkerClient(handle, worker_id, replica)
                    for worker_id, (handle, replica) in present.items()
                }
                yield cast(dict[str, WorkerClient], dict(clients))

    def wake(self) -> None:
        """Start a worker if there is none: make a call that any replica may take, so that Serve's autoscaler starts one for it."""
        if self._wake_task is None or self._wake_task.done():
            self._wake_task = asyncio.create_task(self._wait_for_any(), context=contextvars.Context())

    async def _wait_for_any(self) -> None:
        with contextlib.suppress(Exception):  # the app is stopping, or the replica died; the router calls `wake` again
            await self._handle.info.remote()
