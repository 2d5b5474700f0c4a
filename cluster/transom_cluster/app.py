"""The Ray Serve application: a router deployment (the HTTP ingress) and a worker deployment.

`build_app` takes the names of `transom serve`'s flags, in the Serve YAML under `args:` (see deploy/serve.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from transom_cluster.router.peers import answer_peer
from transom_cluster.serve.autoscaling import serve_autoscaling
from transom_cluster.serve.router_peers import ServeRouterPeers
from transom_cluster.serve.start_checks import check_api_keys
from transom_cluster.serve.worker_directory import ServeWorkerDirectory
from transom_cluster.serve.worker_resources import ROUTER_CPUS, Machines, WorkerResources, worker_resources
from transom_worker.config import EngineConfig
from transom_worker.errors import ConfigError
from transom_worker.settings import Settings

OUTSIDE_THE_APP = {
    # setting of Serve's proxies: where it stands when there is no `transom serve` to set it
    "host": "http_options.host",
    "port": "http_options.port",
    "haproxy": "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1 in Ray's environment",
}
MAX_ONGOING_REQUESTS = (
    10_000  # admission is the worker's business (max_waiting); Serve's default of 5 would queue unseen
)
HEALTH_CHECK_PERIOD_S = 1.0  # how long a dead replica goes unseen by Serve's controller
HEALTH_CHECK_TIMEOUT_S = 10.0  # a replica that is importing or tokenising a huge prompt is not dead
WORKER_DRAIN_S = 60.0  # what still runs then goes on at another worker
ROUTER_DRAIN_S = 300.0  # its clients' connections cannot go elsewhere
ONE_MORE_PERCENT = 1  # a redeploy starts one new replica before it stops an old one; Serve rounds up


@serve.ingress()
class Router:
    """One router replica: the HTTP API on this replica's event loop. Never imports torch."""

    def __init__(self, settings: dict[str, Any], worker: Any) -> None:
        self._settings = Settings.parse(**settings)
        self._worker = worker

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name for it
        """The FastAPI app; Serve runs its lifespan, which opens an event stream to each worker."""
        from transom_cluster.http.api import build_api
        from transom_cluster.router.router import Router as RouterCore
        from transom_worker.logs import show_logs
        from transom_worker.model_files.resolve import resolve_model
        from transom_worker.text.tokenizer import Tokenizer

        replica = serve.get_replica_context()
        router_id = replica.replica_id.unique_id
        find_handle = partial(serve.get_deployment_handle, replica.deployment, replica.app_name)
        show_logs(self._settings.log_format, f"router/{router_id}")
        self._core = RouterCore(
            workers=ServeWorkerDirectory(self._worker),
            tokenizer=Tokenizer.load(resolve_model(self._settings.model)),
            config=self._settings.server_config(),
            router_id=router_id,
            engine_seed=self._settings.seed,
            peers=ServeRouterPeers(router_id, find_handle),
            autoscaling=self._settings.autoscaling_config(),
        )
        return build_api(self._core)

    async def answer_peer(self, asker_id: str, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
        """What another router asks; see `router_peers`."""
        return await answer_peer(self._core, asker_id, method, args)

    async def drain(self) -> None:
        """Refuse new requests, let running answers end, as long as `RouterCore.stop` waits, and let go of the workers."""
        await self._core.stop()


class Worker:
    """Becomes `transom_worker.replica.WorkerReplica` in the replica's process, so that no other process imports torch."""

    def __new__(cls) -> Any:
        """An instance that Serve then initialises with the deployment's arguments; it knows its id, a new one at each start."""
        from transom_worker.replica import WorkerReplica

        worker_id = serve.get_replica_context().replica_id.unique_id

        class ThisWorker(WorkerReplica):
            def __init__(self, config: EngineConfig, model_name: str) -> None:
                super().__init__(config, model_name, worker_id)

        return ThisWorker.__new__(ThisWorker)


def build_app(settings: Mapping[str, Any]) -> serve.Application:
    """The application for settings given by name.

    Raises:
        ConfigError: a setting is wrong, not supported yet, or not the app's.
    """
    for name, place in OUTSIDE_THE_APP.items():
        if name in settings:
            raise ConfigError(f"{name} is a setting of Serve's proxies, not of the app; use {place} instead.")
    checked = Settings.parse(**settings)
    check_api_keys(checked)
    resources = worker_resources(checked, Machines.now())
    worker = _worker_deployment(checked, resources).bind(
        _engine_config(checked, resources), model_name=checked.server_config().served_model_name
    )
    return _router_deployment(checked).bind(dict(settings), worker)


def _engine_config(settings: Settings, resources: WorkerResources) -> EngineConfig:
    config = settings.engine_config()
    return replace(config, ranks=replace(config.ranks, launcher="ray"), num_threads=resources.num_threads)


def _worker_deployment(settings: Settings, resources: WorkerResources) -> Any:
    return serve.deployment(
        Worker,
        name="Worker",
        **_number_of_workers(settings),
        ray_actor_options=resources.actor_options,
        request_router_config=RequestRouterConfig(
            request_router_class="transom_cluster.serve.replica_router.ReplicaRequestRouter"
        ),
        graceful_shutdown_timeout_s=WORKER_DRAIN_S,
        max_surge_percent=ONE_MORE_PERCENT if resources.has_room_for_one_more else 0,
        **({"placement_group_bundles": resources.bundles} if resources.bundles else {}),
        **_serve_options(),
    )


def _number_of_workers(settings: Settings) -> dict[str, Any]:
    if (autoscaling := settings.autoscaling_config()) is None:
        return {"num_replicas": settings.replicas}
    return {"autoscaling_config": serve_autoscaling(autoscaling, initial_replicas=settings.replicas)}


def _router_deployment(settings: Settings) -> Any:
    return serve.deployment(
        Router,
        name="Router",
        num_replicas=settings.router_replicas,
        ray_actor_options={"num_cpus": ROUTER_CPUS},
        max_surge_percent=ONE_MORE_PERCENT,
        graceful_shutdown_timeout_s=max(ROUTER_DRAIN_S, settings.request_timeout_s or 0),
        **_serve_options(),
    )


def _serve_options() -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_constructor_retry_count": 1,  # a wrong checkpoint does not get better by trying again
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
