"""Ranks as Ray actors on a cluster of logical nodes with GPUs that are not there: each has the GPU that Ray granted it.

head: no GPU        nodes "a" and "b": GPU-a0, GPU-a1; GPU-b0, GPU-b1
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests import fake_gpus
from tests.fake_gpus import described, driver_of, several
from transom_core.config import EngineConfig
from transom_core.errors import ConfigError
from transom_core.machine.gpus import NO_DRIVER
from transom_core.settings.gpu_grant import with_grant
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import resolve_for_device
from transom_worker.execution.ranks import actor_launcher
from transom_worker.execution.ranks.actor_launcher import RankActor, RankActors
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve]

NODES = {
    name: driver_of(*[replace(gpu, uuid=f"GPU-{name}{i}") for i, gpu in enumerate(several(2))]) for name in ("a", "b")
}


class FakeGpuActor(RankActor):
    """A rank whose process finds the GPUs of its node."""

    def run(self, setup: Any) -> None:
        fake_gpus.install_from_environment()
        super().run(setup)


@ray.remote
class Worker:
    """What a worker's replica does with its grant."""

    def start_ranks(self, config: EngineConfig) -> str:
        """Start and end the ranks; return why that failed."""
        fake_gpus.install_from_environment()
        actor_launcher.RankActor = FakeGpuActor  # type: ignore[misc]
        ranks = RanksExecutor(resolve_for_device(config), RankActors)
        try:
            ranks.start()
        except ConfigError as error:
            return str(error)
        finally:
            ranks.shutdown()
        return ""

    def share(self, config: EngineConfig) -> tuple[str, float]:
        """Return the GPU of a worker of one rank, and its share of it."""
        granted = ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)
        return os.environ["CUDA_VISIBLE_DEVICES"], with_grant(config, granted).cache.gpu_share


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """The cluster; ranks leave a file for their GPU in the folder."""

    def variables(driver: Any) -> dict[str, str]:
        return {fake_gpus.VARIABLE: described(driver, tmp_path)}

    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "env_vars": variables(NO_DRIVER)}
    )
    try:
        for driver in NODES.values():
            made.add_node(num_cpus=2, num_gpus=2, env_vars=variables(driver))
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield tmp_path
    finally:
        ray.shutdown()
        made.shutdown()


def start(model: Path, strategy: str) -> str:
    """Start a worker of two ranks in a placement group; return why that failed."""
    settings = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "tensor_parallel_size": 2, "device": "cuda"}
    config = Settings.parse(model=str(model), **settings).engine_config()
    config = replace(config, ranks=replace(config.ranks, launcher="ray"))
    group = placement_group([{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2], strategy=strategy)
    in_group = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    worker = Worker.options(num_cpus=1, scheduling_strategy=in_group).remote()  # type: ignore[attr-defined]
    try:
        return str(ray.get(worker.start_ranks.remote(config), timeout=300))
    finally:
        ray.kill(worker)
        remove_placement_group(group)


def test_ranks_over_placement_groups(tiny_model: Path, cluster: Path) -> None:
    assert start(tiny_model, "STRICT_SPREAD") == ""  # the worker itself runs at the head, which has no GPU
    assert {path.name for path in cluster.iterdir()} == {"GPU-a0", "GPU-b0"}
    for path in cluster.iterdir():
        assert path.read_text() == "0"
        path.unlink()
    assert start(tiny_model, "PACK") == ""
    found = {path.name: path.read_text() for path in cluster.iterdir()}
    assert found in ({"GPU-a0": "0", "GPU-a1": "1"}, {"GPU-b0": "0", "GPU-b1": "1"})

    config = Settings.parse(model="m").engine_config()
    sharing = [Worker.options(num_gpus=0.5, num_cpus=0).remote() for _ in range(2)]  # type: ignore[attr-defined]
    (gpu, share), other = ray.get([worker.share.remote(config) for worker in sharing])
    assert (gpu, share) == other == ("0", 0.5)
