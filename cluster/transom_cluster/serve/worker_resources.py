"""What Ray is asked for one worker: shares of the machine's cores, or GPUs, in a bundle for each rank."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transom_worker.settings import Settings

ROUTER_CPUS = 0.25
OWN_CPUS = 0.05  # of a replica whose ranks compute elsewhere, on CPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """The cluster as it is now: cores of each node, and GPUs in all."""

    node_cpus: tuple[float, ...]
    num_gpus: int

    @classmethod
    def now(cls) -> ClusterResources:
        """Those of the Ray that this process has joined; without one, this machine's cores."""
        import ray

        if not ray.is_initialized():
            return cls(node_cpus=(float(len(os.sched_getaffinity(0))),), num_gpus=0)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = tuple(node["CPU"] for node in nodes if node.get("CPU", 0) > 0)
        return cls(node_cpus=cpus or (1.0,), num_gpus=int(sum(node.get("GPU", 0) for node in nodes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """Of one worker: options of its replica's actor, bundles (its own, then one a rank; None for one rank), a rank's threads."""

    actor_options: dict[str, Any]
    bundles: list[dict[str, float]] | None
    num_threads: int

    @property
    def can_start_one_more(self) -> bool:
        """Whether a worker can start beside all others: cores are shares, GPUs may all be in use."""
        return not any(
            "GPU" in bundle or "num_gpus" in bundle for bundle in [self.actor_options, *(self.bundles or ())]
        )


def worker_resources(settings: Settings, machines: ClusterResources) -> WorkerResources:
    """GPUs where there are some, one a rank; else cores and their OpenMP threads, shared by all workers and ranks.

    On CPUs all that is asked for fits beside one worker more, so that a new one starts while an old one drains.
    """
    num_ranks = settings.tensor_parallel_size
    if settings.device == "cuda" or (settings.device == "auto" and machines.num_gpus > 0):
        threads = settings.num_threads or int(max(machines.node_cpus))
        return _resources(threads, num_ranks, own={"CPU": 1}, each={"CPU": 1, "GPU": 1})
    node_cpus = max(machines.node_cpus)
    workers_a_node = math.ceil(num_workers(settings) / len(machines.node_cpus))
    threads = settings.num_threads or max(1, int(node_cpus) // (workers_a_node * num_ranks))
    left = node_cpus - ROUTER_CPUS * settings.router_replicas
    share = max(left, node_cpus / 4) / (workers_a_node + 1)
    if num_ranks == 1:
        return _resources(threads, 1, own={}, each={"CPU": _rounded(min(threads, share))})
    each = min(float(threads), max(share - OWN_CPUS, share / 2) / num_ranks)
    return _resources(threads, num_ranks, own={"CPU": OWN_CPUS}, each={"CPU": _rounded(each)})


def num_workers(settings: Settings) -> int:
    """The most workers that there may be."""
    return max(settings.replicas, settings.max_replicas or 0)


def _resources(threads: int, num_ranks: int, *, own: dict[str, float], each: dict[str, float]) -> WorkerResources:
    alone = num_ranks == 1
    held = each if alone else own
    return WorkerResources(
        actor_options={
            "num_cpus": held["CPU"],
            **({"num_gpus": held["GPU"]} if "GPU" in held else {}),
            "runtime_env": {
                "env_vars": {
                    # Ray would set the thread count to num_cpus, and spinning threads starve the router on small machines.
                    "OMP_NUM_THREADS": str(threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                }
            },
        },
        bundles=None if alone else [own, *([each] * num_ranks)],
        num_threads=threads,
    )


def _rounded(cpus: float) -> float:
    """Down to Ray's granularity, with room for sums."""
    return math.floor(cpus * 100) / 100


def check_gpus(settings: Settings, num_gpus: int) -> str | None:
    """Why the workers cannot have the GPUs that they need here, or None. Ray would wait for them for ever."""
    if settings.device == "cpu" or (settings.device == "auto" and num_gpus == 0):
        return None
    needed = num_workers(settings) * settings.tensor_parallel_size
    if needed <= num_gpus:
        return None
    workers = "--max-replicas" if settings.max_replicas else "--replicas"
    return (
        f"{workers} {num_workers(settings)} with --tensor-parallel-size {settings.tensor_parallel_size} needs {needed} GPUs and "
        f"this machine has {num_gpus}; ask for fewer, or use --device cpu."
    )


def count_visible_gpus(device_files: Sequence[str], visible: str | None) -> int:
    """GPUs by their device files (nvidia0, ...), or those that CUDA_VISIBLE_DEVICES leaves."""
    present = sum(name.removeprefix("nvidia").isdecimal() for name in device_files)
    return present if visible is None else min(present, len([one for one in visible.split(",") if one.strip()]))
