"""A wrong setting is refused before Ray and the weights are loaded, with what was given and what is allowed. The resources that
workers request from Ray never exceed those of the cluster, also on small machines."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpus import driver_of, host, several
from transom_cluster.serve import start_checks
from transom_cluster.serve.start_checks import check_start
from transom_cluster.serve.worker_resources import ROUTER_CPUS, ClusterResources, WorkerResources, worker_resources
from transom_core.errors import ConfigError
from transom_core.machine.openmp import SPIN_ROUNDS
from transom_core.settings.settings import Settings

WINDOW = '{"type": "window", "window": 64}'
HYBRID: dict[str, Any] = {"window": 64, "window_pattern": "SF"}
LAPTOP = ClusterResources(node_cpus=(2.0,), num_gpus=0)


def check(model: Path, **settings: object) -> None:
    check_start(Settings.parse(model=str(model), port=0, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_policy": '{"type": "window", "window": 4096}'}, "kv_policy.window is 4096 .* up to 2048 tokens"),
        ({"kv_policy": '{"type": "heavy", "budget": 32}'}, "kv_policy.budget is 32; .* at least 64"),
        ({"kv_policy": WINDOW, **HYBRID}, "2 of its 4 layers have sliding windows"),
        ({"kv_policy": WINDOW, "chunk": 32, "window_pattern": "CF"}, "2 of its 4 layers have chunked attention"),
        ({"kv_cache_dtype": "window=int8"}, "names window, and the KV groups of this model are full"),
        ({"kv_cache_dtype": "chunk=int8", **HYBRID}, r"names chunk, .* window_64 \(kind window\)"),
        ({"kv_cache_dtype": "full=bfloat16", "dtype": "float32"}, "asks for bfloat16 in KV group full, .* float32"),
        ({"tensor_parallel_size": 99}, "99"),
        ({"worker_group": ["role=prefill,tensor_parallel_size=99"]}, "99"),
    ],
)
def test_what_the_model_cannot_take_is_refused(tiny_model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tiny_model, **settings)


def test_what_the_model_can_take_is_not_refused(tiny_model: Path) -> None:
    check(tiny_model, kv_policy=WINDOW, kv_cache_dtype="full=int8")
    check(tiny_model, kv_cache_dtype="window=int4,full=fp8", **HYBRID)
    check(tiny_model, tensor_parallel_size=3, worker_group=["role=prefill,tensor_parallel_size=2"])


@pytest.mark.parametrize(
    ("settings", "visible", "message"),
    [
        ({}, None, None),
        ({"device": "cpu", "quantization": "int8"}, None, None),
        (
            {"quantization": "int4"},
            None,
            "--quantization int4 runs on CPUs, and --device is auto on a machine with 2 GPUs",
        ),
        ({"quantization": "int4"}, "-1", None),
        ({"replicas": 9}, "", None),
        ({"replicas": 2, "tensor_parallel_size": 1}, None, None),
        (
            {"max_replicas": 3, "tensor_parallel_size": 2},
            None,
            "--max-replicas 3 with --tensor-parallel-size 2 needs 6 GPUs",
        ),
        ({"replicas": 3}, None, "needs 3 GPUs and this machine has 2"),
        ({"replicas": 2}, "GPU-1", "needs 2 GPUs and CUDA_VISIBLE_DEVICES 'GPU-1' leaves 1 of this machine's 2"),
        ({"device": "cuda"}, "1", None),
    ],
)
def test_the_machine_is_asked_for_its_gpus(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], visible: str | None, message: str | None
) -> None:
    monkeypatch.setattr(start_checks, "gpu_problem", lambda *_: None)
    driver = driver_of(*several(2))
    host(monkeypatch, driver, visible)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        start_checks.check_machine(Settings.parse(model="m", **settings), driver)


def test_host_tiers_that_do_not_fit_together_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "role=prefill,tensor_parallel_size=2,swap_space=2GiB"
    settings = Settings.parse(model="tiny", replicas=2, swap_space="1GiB", worker_group=[group])
    monkeypatch.setattr(start_checks, "available_host_bytes", lambda: 6 * 2**30)
    start_checks.check_host_tiers(settings)
    monkeypatch.setattr(start_checks, "available_host_bytes", lambda: 4 * 2**30)
    words = r"all 4 ranks .* take 6442450944 bytes, .* 4294967296 bytes free.*most 1.00GiB"
    with pytest.raises(ConfigError, match=words):
        start_checks.check_host_tiers(settings)


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
    for settings in ({"replicas": 2}, {"replicas": 2, "tensor_parallel_size": 2}, {"max_replicas": 2}):
        assert of(LAPTOP, **settings).num_threads == 1
    several = ClusterResources(node_cpus=(16.0, 16.0, 16.0), num_gpus=0)
    assert of(several, replicas=3).num_threads == 16
    assert of(several, replicas=4, tensor_parallel_size=2).num_threads == 4
    assert of(LAPTOP, num_threads=1).num_threads == 1


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
    host(monkeypatch, driver_of(*several(8)), visible)
    assert ClusterResources.of_this_machine().num_gpus == expected
