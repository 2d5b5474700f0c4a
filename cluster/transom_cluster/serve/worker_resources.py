"""Computes the resources that one worker requests from Ray: GPUs, or shares of the hosts' CPU cores.

A worker with several ranks requests a placement group with one bundle for its replica and one for each rank. On CPUs the workers
share the cores. For example, with 8 cores, 1 router (0.25 CPU) and 2 workers of one rank on one host, each worker runs 8 // 2 = 4
OpenMP threads and requests (8 - 0.25) / 3 = 2.58 CPUs, so that a third worker fits during a redeploy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transom_core.machine.gpu_checks import too_few_gpus
from transom_core.machine.gpus import GpuDriver, read_driver, visible_gpus
from transom_core.machine.openmp import wait_variables
from transom_core.settings.settings import Settings

ROUTER_CPUS = 0.25  # that a router requests from Ray
REPLICA_CPUS = 0.05  # for a replica whose ranks are other processes, on CPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """The cluster's resources now: CPU cores of each node, and GPUs in total."""

    node_cpus: tuple[float, ...]
    num_gpus: int

    @classmethod
    def of_this_machine(cls) -> ClusterResources:
        """Return the resources of a Ray cluster that this process starts on this machine."""
        return cls(node_cpus=(float(len(os.sched_getaffinity(0))),), num_gpus=len(visible_gpus(read_driver())))

    @classmethod
    def now(cls) -> ClusterResources:
        """Return the resources of the Ray cluster that this process has joined, or this machine's cores if it has joined none."""
        import ray

        if not ray.is_initialized():
            return cls(node_cpus=(float(len(os.sched_getaffinity(0))),), num_gpus=0)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = tuple(node["CPU"] for node in nodes if node.get("CPU", 0) > 0)
        return cls(node_cpus=cpus or (1.0,), num_gpus=int(sum(node.get("GPU", 0) for node in nodes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """One worker's resources.

    `num_cpus` and `num_gpus` are requested for the replica's actor. `bundles` has the replica's bundle, then one per rank; None for
    one rank. Each rank has `num_threads` threads. `environment` has the environment variables of the worker's processes. One node
    has at most `workers_per_node` workers.
    """

    num_cpus: float
    num_gpus: float
    bundles: list[dict[str, float]] | None
    num_threads: int
    environment: dict[str, str]
    workers_per_node: int = 1

    @property
    def actor_options(self) -> dict[str, Any]:
        """Return the options of the replica's actor. Its ranks' actors inherit the runtime environment, if there is one."""
        return {
            "num_cpus": self.num_cpus,
            **({"num_gpus": self.num_gpus} if self.num_gpus else {}),
            **({"runtime_env": {"env_vars": self.environment}} if self.environment else {}),
        }

    @property
    def has_gpus(self) -> bool:
        """Return whether the worker's ranks run on GPUs."""
        return bool(self.num_gpus) or any("GPU" in bundle for bundle in self.bundles or ())

    @property
    def can_start_one_more(self) -> bool:
        """Return whether one more worker can start in a redeploy: shares of cores leave room for it, but GPUs may all be in use."""
        return not self.has_gpus


def worker_resources(
    settings: Settings, machines: ClusterResources, others: Sequence[Settings] = ()
) -> WorkerResources:
    """Return the resources of one worker: one GPU per rank if there are GPUs, else a share of the cores and their OpenMP threads.

    `others` are the application's other groups of workers, which share the cores. On CPUs the requests of all workers leave room
    for one more, so that a new worker can start while an old one drains.
    """
    num_ranks = settings.tensor_parallel_size
    if settings.device == "cuda" or (settings.device == "auto" and machines.num_gpus > 0):
        gpus_per_node = math.ceil(machines.num_gpus / len(machines.node_cpus))
        threads = settings.num_threads or max(1, int(max(machines.node_cpus)) // max(1, gpus_per_node))
        return _resources(threads, num_ranks, replica={"CPU": 1}, rank={"CPU": 1, "GPU": 1})
    node_cpus = max(machines.node_cpus)
    groups = (settings, *others)
    workers_per_node = math.ceil(sum(map(num_workers, groups)) / len(machines.node_cpus))
    ranks_per_node = workers_per_node * num_ranks
    if others:
        num_all = sum(num_workers(one) * one.tensor_parallel_size for one in groups)
        ranks_per_node = math.ceil(num_all / len(machines.node_cpus))
    threads = settings.num_threads or max(1, int(node_cpus) // ranks_per_node)
    left = node_cpus - ROUTER_CPUS * settings.router_replicas
    share = max(left, node_cpus / 4) / (workers_per_node + 1)
    if num_ranks == 1:
        resources = _resources(threads, 1, replica={}, rank={"CPU": _rounded(min(threads, share))})
        return replace(resources, workers_per_node=workers_per_node)
    rank_cpus = min(float(threads), max(share - REPLICA_CPUS, share / 2) / num_ranks)
    resources = _resources(threads, num_ranks, replica={"CPU": REPLICA_CPUS}, rank={"CPU": _rounded(rank_cpus)})
    return replace(resources, workers_per_node=workers_per_node)


def num_workers(settings: Settings) -> int:
    """Return the largest number of workers that the settings allow."""
    return max(settings.replicas, settings.max_replicas or 0)


def _resources(threads: int, num_ranks: int, *, replica: dict[str, float], rank: dict[str, float]) -> WorkerResources:
    has_one_rank = num_ranks == 1
    actor = rank if has_one_rank else replica
    return WorkerResources(
        num_cpus=actor["CPU"],
        num_gpus=actor.get("GPU", 0.0),
        bundles=None if has_one_rank else [replica, *([rank] * num_ranks)],
        num_threads=threads,
        environment={"OMP_NUM_THREADS": str(threads), **wait_variables(os.environ)},  # else Ray sets it to num_cpus
    )


def _rounded(cpus: float) -> float:
    """Round down to hundredths, so that the sum of all shares still fits. Ray's granularity is finer."""
    return math.floor(cpus * 100) / 100


def check_gpus(settings: Settings, driver: GpuDriver) -> str | None:
    """Return the reason why this machine has too few GPUs for the workers, or None. Ray would wait forever for missing GPUs."""
    needed = sum(num_workers(one) * one.tensor_parallel_size for one in (settings, *settings.groups()))
    workers = "--max-replicas" if settings.max_replicas else "--replicas"
    what = f"{workers} {num_workers(settings)} with --tensor-parallel-size {settings.tensor_parallel_size}"
    return too_few_gpus(needed, driver, what)
