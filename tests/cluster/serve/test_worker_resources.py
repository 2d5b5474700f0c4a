"""The resources that workers request from Ray never exceed those of the cluster, also on small machines."""

import math

import pytest

from tests.fake_gpus import driver_of, install, several
from transom_cluster.serve.worker_resources import (
    ROUTER_CPUS,
    ClusterResources,
    WorkerResources,
    worker_resources,
)
from transom_core.machine.openmp import SPIN_ROUNDS
from transom_core.settings.settings import Settings

LAPTOP = ClusterResources(node_cpus=(2.0,), num_gpus=0)


def of(machines: ClusterResources, **settings: object) -> WorkerResources:
    return worker_resources(Settings.parse(model="m", **settings), machines)


def cpus(resources: WorkerResources) -> float:
    bundles = resources.bundles or [{"CPU": resources.actor_options["num_cpus"]}]
    return math.fsum(bundle["CPU"] for bundle in bundles)


@pytest.mark.parametrize("cores", [1.0, 2.0, 4.0, 64.0])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("threads", [None, 1, 1000])
def test_all_workers_one_more_and_the_routers_fit(cores, replicas, ranks, threads):
    machines = ClusterResources(node_cpus=(cores,), num_gpus=0)
    resources = of(machines, replicas=replicas, tensor_parallel_size=ranks, num_threads=threads)
    assert cpus(resources) > 0
    assert (replicas + 1) * cpus(resources) + ROUTER_CPUS <= cores
    if resources.bundles:
        assert len(resources.bundles) == ranks + 1
        assert min(bundle["CPU"] for bundle in resources.bundles) > 0
        assert resources.actor_options["num_cpus"] == resources.bundles[0]["CPU"]


def test_threads_are_divided_among_workers_and_ranks():
    assert of(LAPTOP).num_threads == 2
    assert of(LAPTOP, replicas=2).num_threads == 1
    assert of(LAPTOP, replicas=2, tensor_parallel_size=2).num_threads == 1
    assert of(LAPTOP, max_replicas=2).num_threads == 1
    several = ClusterResources(node_cpus=(16.0, 16.0, 16.0), num_gpus=0)
    assert of(several, replicas=3).num_threads == 16
    assert of(several, replicas=4, tensor_parallel_size=2).num_threads == 4
    given = of(LAPTOP, num_threads=1)
    assert given.num_threads == 1


def test_waiting_threads_of_a_worker_spin_for_a_moment_unless_the_user_has_chosen(monkeypatch):
    def variables() -> dict[str, str]:
        return of(LAPTOP, num_threads=1).actor_options["runtime_env"]["env_vars"]

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert variables() == {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": str(SPIN_ROUNDS)}
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert variables() == {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 0), ("auto", 1)])
def test_a_gpu_for_each_rank(device, num_gpus):
    machines = ClusterResources(node_cpus=(16.0,), num_gpus=num_gpus)
    alone = of(machines, device=device)
    assert alone.bundles is None
    assert (alone.actor_options["num_gpus"], alone.actor_options["num_cpus"]) == (1, 1)
    assert not alone.can_start_one_more
    several = of(machines, device=device, tensor_parallel_size=3)
    assert several.bundles == [{"CPU": 1}, *[{"CPU": 1, "GPU": 1}] * 3]
    assert "num_gpus" not in several.actor_options
    assert not several.can_start_one_more
    assert of(ClusterResources(node_cpus=(64.0, 64.0), num_gpus=16), device="cuda").num_threads == 8
    assert of(LAPTOP, tensor_parallel_size=3).can_start_one_more


@pytest.mark.parametrize(("visible", "expected"), [(None, 8), ("-1", 0), ("2,GPU-3", 1), ("4,5", 2), ("0,0", 0)])
def test_ray_is_told_how_many_gpus_there_are(monkeypatch: pytest.MonkeyPatch, visible, expected):
    """Ray would take each entry of CUDA_VISIBLE_DEVICES for a GPU: "-1" for one, and "0,0" for two."""
    install(driver_of(*several(8)), monkeypatch.setattr)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ClusterResources.of_this_machine().num_gpus == expected
