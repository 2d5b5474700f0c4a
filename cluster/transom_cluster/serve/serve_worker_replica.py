"""The worker replica that Ray Serve runs. Only a worker's process imports this module, since it imports torch."""

from __future__ import annotations

from dataclasses import replace

from ray import serve

from transom_cluster.serve.worker_peers import ServeWorkerPeers
from transom_core.config import EngineConfig
from transom_worker.replica import WorkerReplica


class ServeWorkerReplica(WorkerReplica):
    """A `WorkerReplica` that gets its id, its share of the cores and its peers from Ray Serve. It has a new id at each start."""

    def __init__(self, config: EngineConfig, model_name: str, deployments: tuple[str, ...]) -> None:
        """Start the engine. `deployments` has the names of all worker deployments of the application."""
        context = serve.get_replica_context()
        share = replace(config.core_share, index=config.core_share.index + context.rank.local_rank)
        super().__init__(
            replace(config, core_share=share),
            model_name,
            context.replica_id.unique_id,
            peers=ServeWorkerPeers(deployments, context.app_name),
            ends_process=True,
        )
