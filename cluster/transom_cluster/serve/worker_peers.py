"""`ServeWorkerPeers`: lets a worker replica call the application's other worker replicas for KV transfer, through Ray Serve
handles.

The bytes of KV blocks are results of calls: Ray puts them into its object store, and frees them once the caller has read them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from transom_cluster.serve.running_replicas import running_replicas_of
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes
from transom_core.errors import WorkerLost

FIND_S = 2.0  # Serve reports a deployment's replicas to a process within this time after the handle's first use


class ServeWorkerPeers:
    """Implements `PrefixPeers` for the replicas of some deployments of one application. Runs on the worker's event loop."""

    def __init__(self, deployments: Sequence[str], app: str) -> None:
        self._deployments, self._app = deployments, app
        self._handles: dict[str, Any] = {}  # by deployment

    async def open_export(self, worker: str, query: PrefixQuery) -> PrefixOffer | str:
        """Call the worker's `open_export`."""
        offer: PrefixOffer | str = await (await self._handle_of(worker)).open_export.remote(query)
        return offer

    async def read_export(self, worker: str, export_id: str, blocks: BlockRange) -> list[Bytes]:
        """Call the worker's `read_export`."""
        data: list[Bytes] = await (await self._handle_of(worker)).read_export.remote(export_id, blocks)
        return data

    async def close_export(self, worker: str, export_id: str) -> None:
        """Call the worker's `close_export`."""
        await (await self._handle_of(worker)).close_export.remote(export_id)

    async def _handle_of(self, worker: str) -> Any:
        """Return a handle whose calls go to one worker. Raises WorkerLost if the worker does not run."""
        if not self._handles:
            self._handles = await asyncio.to_thread(self._find_handles)
        running = {name: running_replicas_of(name, self._app) for name in self._handles}
        changed = asyncio.Event()
        with contextlib.ExitStack() as subscriptions, contextlib.suppress(TimeoutError):
            for replicas in running.values():
                subscriptions.enter_context(replicas.subscribed(changed))
            async with asyncio.timeout(FIND_S):
                while True:
                    changed.clear()
                    for name, replicas in running.items():
                        if worker in replicas.replicas:
                            return self._handles[name].options(session_id=worker)
                    await changed.wait()
        raise WorkerLost(f"Worker {worker} is gone.")

    def _find_handles(self) -> dict[str, Any]:
        from ray import serve

        handles = {name: serve.get_deployment_handle(name, self._app) for name in self._deployments}
        for handle in handles.values():
            handle.options(method_name="open_export")  # makes Serve start to report replicas to this process
        return handles
