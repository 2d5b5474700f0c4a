"""The Ray Serve application: a router deployment (the HTTP ingress) and a worker deployment.

`build_app` takes the names of `transom serve`'s flags, in the Serve YAML under `args:` (see deploy/serve.yaml).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve

from transom_cluster.start_checks import check_api_keys
from transom_cluster.worker_client import ServeWorkerClient
from transom_worker.config import Settings
from transom_worker.errors import ConfigError

OUTSIDE_THE_APP = {
    # setting of Serve's proxies: where it stands when there is no `transom serve` to set it
    "host": "http_options.host",
    "port": "http_options.port",
    "haproxy": "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1 in Ray's environment",
}
ROUTER_CPUS = 0.25
MAX_ONGOING_REQUESTS = (
    10_000  # admission is the worker's business (max_waiting); Serve's default of 5 would queue unseen
)
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 10.0  # a replica that is importing or tokenising a huge prompt is not dead
GRACEFUL_SHUTDOWN_S = 5.0


@serve.ingress()
class Router:
    """One router replica: the HTTP API on this replica's event loop. Never imports torch."""

    def __init__(self, settings: dict[str, Any], worker: Any) -> None:
        self._settings = Settings.parse(**settings)
        self._worker = worker

    def __serve_build_asgi_app__(self) -> Any:  # Serve's name for it
        """The FastAPI app; Serve runs its lifespan, which opens the event stream to the worker."""
        from transom_cluster.ingress import build_api
        from transom_cluster.router import Router as RouterCore
        from transom_worker.model_files import resolve_model
        from transom_worker.tokenizer import Tokenizer

        core = RouterCore(
            worker=ServeWorkerClient(self._worker),
            tokenizer=Tokenizer.load(resolve_model(self._settings.model)),
            config=self._settings.server_config(),
            router_id=serve.get_replica_context().replica_id.unique_id,
            engine_seed=self._settings.seed,
        )
        return build_api(core)


class Worker:
    """Becomes `transom_worker.replica.WorkerReplica` in the replica's process, so that no other process imports torch."""

    def __new__(cls) -> Any:
        """An instance that Serve then initialises with the deployment's arguments."""
        from transom_worker.replica import WorkerReplica

        return WorkerReplica.__new__(WorkerReplica)


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
    worker = _worker_deployment(checked).bind(
        checked.engine_config(), model_name=checked.server_config().served_model_name
    )
    router = serve.deployment(
        Router,
        name="Router",
        ray_actor_options={"num_cpus": ROUTER_CPUS},
        **_serve_options(),
    )
    return router.bind(dict(settings), worker)


def _worker_deployment(settings: Settings) -> Any:
    return serve.deployment(
        Worker,
        name="Worker",
        num_replicas=settings.replicas,
        ray_actor_options=worker_resources(settings),
        **_serve_options(),
    )


def _serve_options() -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_constructor_retry_count": 1,  # a wrong checkpoint does not get better by trying again
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


def worker_resources(settings: Settings) -> dict[str, Any]:
    """Ray's options for the worker's actor: a GPU, or nearly all cores with their OpenMP threads."""
    num_cores = len(os.sched_getaffinity(0))
    num_threads = settings.num_threads or num_cores
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and _cluster_has_gpu())
    options: dict[str, Any] = {
        "num_cpus": 1
        if on_gpu
        else max(0.5, min(num_threads, num_cores) - 2 * ROUTER_CPUS),  # what is not there is never granted
        "runtime_env": {
            "env_vars": {
                # Ray would set the thread count to num_cpus, and spinning threads starve the router on small machines.
                "OMP_NUM_THREADS": str(num_threads),
                "OMP_WAIT_POLICY": "PASSIVE",
            }
        },
    }
    return {**options, "num_gpus": 1} if on_gpu else options


def _cluster_has_gpu() -> bool:
    import ray

    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1)
