"""The Ray Serve application: a router deployment, which is the HTTP ingress, and a worker deployment.

`build_app` takes the settings of `transom serve` by name. A Serve YAML gives them under `args:` (see deploy/serve.yaml).

Router: the deployment named "Router"; each of its replicas serves the HTTP API and places requests at workers.
Worker: the deployment named "Worker"; each of its replicas runs one engine, with one or several tensor-parallel ranks.
Worker-1, Worker-2, ...: a deployment for each further group of workers (`worker_group`), such as workers of another role.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from transom_cluster.router.peers import PeerQuery
from transom_cluster.serve.replica_autoscaling import serve_autoscaling
from transom_cluster.serve.router_peers import ServeRouterPeers, answer_peer
from transom_cluster.serve.start_checks import check_api_keys
from transom_cluster.serve.worker_directory import ServeWorkerDirectory
from transom_cluster.serve.worker_resources import (
    ROUTER_CPUS,
    ClusterResources,
    WorkerResources,
    num_workers,
    worker_resources,
)
from transom_core.config import CoreShare, EngineConfig
from transom_core.errors import ConfigError
from transom_core.model_files.resolve import with_commit
from transom_core.settings.settings import Settings

WORKER = "Worker"
SERVE_PROXY_SETTINGS = {
    # setting of `transom serve` that configures Serve's proxies: where to set it for `serve deploy`
    "host": "http_options.host",
    "port": "http_options.port",
    "haproxy": "RAY_SERVE_ENABLE_HA_PROXY=1 and RAY_SERVE_THROUGHPUT_OPTIMIZED=1 in Ray's environment",
}
# Workers limit admission themselves (max_waiting); with its default of 5 Serve would queue calls.
MAX_ONGOING_REQUESTS = 10_000
HEALTH_CHECK_PERIOD_S = 1.0  # Serve's controller notices a dead replica within this time
HEALTH_CHECK_TIMEOUT_S = 10.0  # a replica that imports modules or tokenises a huge prompt is slow, not dead
CPU_TARGET_STEP_S = 0.2  # on CPUs; a longer step would delay the requests of all clients
WORKER_DRAIN_S = 330.0  # longer than routers leave requests at a draining worker (`RouterTimings.last_drain_s`)
ROUTER_DRAIN_S = 300.0  # a client's connection cannot migrate to another router
SURGE_PERCENT = 1  # a redeploy starts one new replica before it stops an old one; Serve rounds up


@serve.ingress()
class RouterDeployment:
    """One router replica: it serves the HTTP API on its own event loop, and never imports torch."""

    def __init__(self, settings: dict[str, Any], worker: Any, groups: Sequence[Any] = ()) -> None:
        self._settings = Settings.parse(**settings)
        self._workers = (worker, *groups)

    def __serve_build_asgi_app__(self) -> Any:  # the name of Ray Serve's hook
        """Build the FastAPI app. Ray Serve runs the app's lifespan, which opens an event stream to each worker."""
        from transom_cluster.http.api import build_api
        from transom_cluster.router.router import Router
        from transom_core.grammar import GrammarChecker
        from transom_core.logs import show_logs
        from transom_core.machine.host_memory import freeze_objects, keep_returning_freed_memory
        from transom_core.model_files.resolve import resolve_text_files
        from transom_core.text.tokenizer import Tokenizer

        replica = serve.get_replica_context()
        router_id = replica.replica_id.unique_id
        find_handle = partial(serve.get_deployment_handle, replica.deployment, replica.app_name)
        show_logs(self._settings.log_format, f"router/{router_id}")
        keep_returning_freed_memory()
        tokenizer = Tokenizer.load(resolve_text_files(self._settings.model))
        checker = GrammarChecker(tokenizer)
        # A child process reads the vocabulary.
        threading.Thread(target=checker.warm_up, name="transom-grammar", daemon=True).start()
        self._router = Router(
            workers=ServeWorkerDirectory(*self._workers),
            tokenizer=tokenizer,
            grammar_checker=checker,
            config=self._settings.server_config(),
            router_id=router_id,
            engine_seed=self._settings.seed,
            peers=ServeRouterPeers(router_id, find_handle),
            autoscaling=self._settings.autoscaling_config(),
        )
        api = build_api(self._router)
        freeze_objects()
        return api

    async def answer_peer(self, asker_id: str, query: PeerQuery[Any]) -> tuple[str, Any]:
        """Answer the query of another router replica, `asker_id`; `router.peers` has the queries."""
        return answer_peer(self._router, asker_id, query)

    async def drain(self) -> None:
        """Refuse new requests, wait for the running ones up to the limit of `Router.stop`, and disconnect from the workers."""
        await self._router.stop()


class WorkerDeployment:
    """Becomes a `ServeWorkerReplica` in the replica's process, so that no other process imports torch."""

    def __new__(cls) -> Any:
        """Make an instance that Ray Serve then initialises with the deployment's arguments."""
        from transom_cluster.serve.serve_worker_replica import ServeWorkerReplica

        return ServeWorkerReplica.__new__(ServeWorkerReplica)


def build_app(settings: Mapping[str, Any]) -> serve.Application:
    """Build the Serve application for settings that are given by name.

    Raises:
        ConfigError: a setting is wrong, is not supported yet, or belongs to Serve's proxies.
    """
    return _bind_app(settings, inherits_environment=False)


def build_local_app(settings: Mapping[str, Any]) -> serve.Application:
    """Build the application for a Ray cluster whose processes all inherit `WorkerResources.environment` already."""
    return _bind_app(settings, inherits_environment=True)


def _bind_app(settings: Mapping[str, Any], *, inherits_environment: bool) -> serve.Application:
    """Check the settings, compute the resources of each group of workers, and bind the groups' deployments to the router's."""
    for name, place in SERVE_PROXY_SETTINGS.items():
        if name in settings:
            raise ConfigError(f"{name} is a setting of Serve's proxies, not of the app; use {place} instead.")
    checked = _with_commit(Settings.parse(**settings))
    check_api_keys(checked)
    machines, groups = ClusterResources.now(), checked.groups()
    names = worker_names(checked)
    workers = []
    for number, (name, own) in enumerate(zip(names, (checked, *groups), strict=True)):
        others = [one for one in (checked, *groups) if one is not own]
        resources = worker_resources(own, machines, others)
        if inherits_environment:
            resources = replace(resources, environment={})
        first_worker = sum(map(num_workers, (checked, *groups)[:number]))
        config = worker_engine_config(own, resources, first_worker=first_worker)
        model_name = checked.server_config().served_model_name
        workers.append(worker_deployment(own, resources, name=name).bind(config, model_name, names))
    first, *further = workers
    named = {"model": checked.model, "served_model_name": checked.served_model_name}
    return router_deployment(checked).bind({**settings, **named}, first, *([further] if further else []))


def _with_commit(settings: Settings) -> Settings:
    """Return settings with the model's current commit, so that every worker that starts later loads the same files, even if the
    repository gets a newer commit."""
    names = settings.served_model_name or (settings.model,)
    return settings.model_copy(update={"model": with_commit(settings.model), "served_model_name": names})


def worker_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the deployments of workers: one, and one for each further group."""
    return tuple(WORKER if not number else f"{WORKER}-{number}" for number in range(1 + len(settings.worker_group)))


def worker_engine_config(settings: Settings, resources: WorkerResources, *, first_worker: int = 0) -> EngineConfig:
    """Return the engine's config for a Serve worker, whose ranks Ray starts; `resources` has the number of threads of each rank.

    A machine's cores are divided into shares, one per worker. Shares before `first_worker` belong to other groups of workers; each
    replica later picks its own share. On CPUs, steps get a target time unless the settings say otherwise, because a long step
    delays the requests of all clients. If Ray grants a worker GPUs, the worker computes on them or does not start: the device is
    "cuda", not "auto".
    """
    config = settings.engine_config()
    scheduler, model = config.scheduler, config.model
    if resources.has_gpus:
        model = replace(model, device="cuda")
    if settings.target_step_s is None and not resources.has_gpus:
        scheduler = replace(scheduler, target_step_s=CPU_TARGET_STEP_S)
    ranks = replace(config.ranks, launcher="ray")
    share = CoreShare(index=first_worker, count=1 if resources.has_gpus else resources.workers_per_node)
    return replace(
        config, model=model, scheduler=scheduler, ranks=ranks, num_threads=resources.num_threads, core_share=share
    )


def worker_deployment(settings: Settings, resources: WorkerResources, *, name: str = WORKER) -> Any:
    """Return a worker deployment that is not bound to arguments yet."""
    return serve.deployment(
        WorkerDeployment,
        name=name,
        **_num_workers_options(settings),
        ray_actor_options=resources.actor_options,
        request_router_config=RequestRouterConfig(
            request_router_class="transom_cluster.serve.replica_router.ReplicaRequestRouter"
        ),
        graceful_shutdown_timeout_s=WORKER_DRAIN_S,
        **_surge_options(SURGE_PERCENT if resources.can_start_one_more else 0),
        **({"placement_group_bundles": resources.bundles} if resources.bundles else {}),
        **_shared_options(),
    )


def router_deployment(settings: Settings) -> Any:
    """Return the router deployment, not bound to arguments yet."""
    return serve.deployment(
        RouterDeployment,
        name="Router",
        num_replicas=settings.router_replicas,
        ray_actor_options={"num_cpus": ROUTER_CPUS},
        **_surge_options(SURGE_PERCENT),
        graceful_shutdown_timeout_s=max(ROUTER_DRAIN_S, settings.request_timeout_s or 0),
        **_shared_options(),
    )


def _num_workers_options(settings: Settings) -> dict[str, Any]:
    if (autoscaling := settings.autoscaling_config()) is None:
        return {"num_replicas": settings.replicas}
    return {"autoscaling_config": serve_autoscaling(autoscaling, initial_replicas=settings.replicas)}


def _surge_options(percent: int) -> dict[str, int]:
    """Return the option for how many replicas a redeploy starts before it stops old ones. Ray before 2.60 has no such option and
    stops an old replica first."""
    return {"max_surge_percent": percent} if "max_surge_percent" in signature(serve.deployment).parameters else {}


def _shared_options() -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_constructor_retry_count": 1,  # a retry does not repair a wrong checkpoint
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
