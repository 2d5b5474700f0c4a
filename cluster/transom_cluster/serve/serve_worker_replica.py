"""The worker replica that Ray Serve runs. Only a worker's process imports this module, since it imports torch."""

from dataclasses import replace

import ray
from ray import serve

from transom_cluster.serve.worker_peers import ServeWorkerPeers
from transom_core.config import EngineConfig
from transom_core.settings.gpu_grant import with_grant
from transom_worker.replica import WorkerReplica


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
