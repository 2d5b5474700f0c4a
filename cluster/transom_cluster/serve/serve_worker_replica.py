"""The worker replica that Ray Serve runs, and `ServeWorkerPeers`, by which it calls the application's other worker replicas for KV
transfer. Only a worker's process imports this module, since it imports torch.

The bytes of KV blocks are results of calls: Ray puts them into its object store, and frees them once the caller has read them.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from transom_cluster.serve.running_replicas import running_replicas
from transom_core.client_queue import Sharer
from transom_core.config import EngineConfig
from transom_core.contract import PrefixSource
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes
from transom_core.errors import WorkerLost
from transom_core.settings.gpu_grant import with_grant
from transom_worker.replica import WorkerReplica

FIND_S = 2.0  # Serve reports a deployment's replicas to a process within this time after the handle's first use


class ServeWorkerReplica(WorkerReplica):
    """A `WorkerReplica` that gets its id, its share of the cores and its peers from Ray Serve. It has a new id at each start."""

    def __init__(self, config: EngineConfig, model_name: str, deployments: tuple[str, ...]) -> None:
        """Start the engine. `deployments` has the names of all worker deployments of the application."""
        context = serve.get_replica_context()
        share = replace(config.core_share, index=config.core_share.index + context.rank.local_rank)
        if config.ranks.size == 1:  # the GPUs of several ranks are granted to the ranks' actors
            config = with_grant(config, ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))
        super().__init__(
            replace(config, core_share=share),
            model_name,
            context.replica_id.unique_id,
            peers=ServeWorkerPeers(deployments, context.app_name),
            node=ray.get_runtime_context().get_node_id(),
            ends_process=True,
        )


class ServeWorkerPeers:
    """Implements `PrefixPeers` for the replicas of some deployments of one application. Runs on the worker's event loop."""

    def __init__(self, deployments: Sequence[str], app: str) -> None:
        self._deployments, self._app = deployments, app
        self._handles: list[Any] = []

    async def open_export(self, worker: str, query: PrefixQuery) -> PrefixOffer | str:
        """Call the worker's `open_export`."""
        offer: PrefixOffer | str = await (await self._handle_of(worker)).open_export.remote(query)
        return offer

    async def own_query(self, worker: str, query: PrefixQuery) -> PrefixQuery | None:
        """Call the worker's `own_query`."""
        own: PrefixQuery | None = await (await self._handle_of(worker)).own_query.remote(query)
        return own

    async def fetch_early(
        self, worker: str, source: PrefixSource, query: PrefixQuery, offer: PrefixOffer, sharer: Sharer
    ) -> bool:
        """Call the worker's `fetch_early`."""
        has_come: bool = await (await self._handle_of(worker)).fetch_early.remote(source, query, offer, sharer)
        return has_come

    async def read_export(self, worker: str, export_id: str, blocks: BlockRange) -> list[Bytes]:
        """Call the worker's `read_export`."""
        data: list[Bytes] = await (await self._handle_of(worker)).read_export.remote(export_id, blocks)
        return data

    async def close_export(self, worker: str, export_id: str, read_bytes: int) -> bool:
        """Call the worker's `close_export`."""
        was_open: bool = await (await self._handle_of(worker)).close_export.remote(export_id, read_bytes)
        return was_open

    async def _handle_of(self, worker: str) -> Any:
        """Return a handle whose calls go to one worker. Raises WorkerLost if the worker does not run."""
        if not self._handles:
            self._handles = await asyncio.to_thread(self._find_handles)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIND_S), contextlib.aclosing(running_replicas(self._handles)) as changes:
                async for present in changes:
                    if worker in present:
                        handle, _ = present[worker]
                        return handle.options(session_id=worker)
        raise WorkerLost(f"Worker {worker} is gone.")

    def _find_handles(self) -> list[Any]:
        """Return the deployments' handles, for which Ray's controller is asked: no event loop may run this. Their first `options`
        runs on the event loop that calls them (`running_replicas`), as Serve demands where routers have no loop of their own."""
        return [serve.get_deployment_handle(name, self._app) for name in self._deployments]
