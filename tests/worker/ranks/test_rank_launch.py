"""What a rank is started with: cores of its own, the variables of OpenMP, and for Ray actors a placement group that fits.

What ranks print with lines in JSON: their own, those of libraries, and uncaught errors, each with its rank and worker. Each rank
has a GPU of its own, and what is wrong with it is said in one line; on GPUs that are not there (`fake_gpus`). As Ray actors on a
cluster of logical nodes, each has the GPU that Ray granted it.
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests import fake_gpus
from tests.fake_gpus import H100, described, driver_of, host, part, several
from tests.worker.ranks.rank_watch import left_behind
from transom_core.config import CoreShare, EngineConfig
from transom_core.errors import ConfigError
from transom_core.machine.gpus import NO_DRIVER, GpuDriver
from transom_core.machine.openmp import SPIN_ROUNDS
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import resolve_for_device
from transom_worker.execution.ranks import actor_launcher, group, process_launcher, rank_main
from transom_worker.execution.ranks.actor_launcher import RankActor, RankActors
from transom_worker.execution.ranks.launcher import RankExit
from transom_worker.execution.ranks.messages import Hello, Load, RankSetup
from transom_worker.execution.ranks.process_launcher import RankProcesses
from transom_worker.execution.ranks.rank_startup import start_ranks
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

CONFIG = Settings.parse(model="m", device="cpu", tensor_parallel_size=2).engine_config()
LOAD = Load("", ranks_on_host=2, index_on_host=1)
WRITES_ITS_VARIABLES = (
    "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text("
    "' '.join(f'{name}={os.environ[name]}' for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY') if name in os.environ))"
)
RANK = """
import logging, threading, warnings
from transom_worker.execution.ranks import rank_main

class Setup(rank_main.ModelSetup):
    def allocate(self, pool_bytes, contents):
        {}
        return super().allocate(pool_bytes, contents)

rank_main.ModelSetup = Setup
rank_main.main()
"""
TALK = (
    'logging.getLogger("transom.worker").info("own"); logging.getLogger("another").warning("others"); warnings.warn("old");'
    "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()"
)
DIVIDED = driver_of(replace(H100, parts=(part(1), part(2), part(3))))
NODES = {
    name: driver_of(*[replace(gpu, uuid=f"GPU-{name}{i}") for i, gpu in enumerate(several(2))]) for name in ("a", "b")
}


def setup_of(rank: int) -> RankSetup:
    return RankSetup(config=CONFIG, rank=rank, size=2, endpoint="", server_key=b"")


def test_a_rank_on_its_own_cores_has_a_thread_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its worker is the only one there and computes on CPUs."""
    asked: list[CoreShare] = []

    def keep(share: CoreShare) -> frozenset[int]:
        asked.append(share)
        return frozenset({4, 5, 6})

    monkeypatch.setattr(rank_main, "keep_to_share", keep)
    assert rank_main._on_own_cores(CONFIG, LOAD).num_threads == 3
    assert rank_main._on_own_cores(replace(CONFIG, num_threads=2), LOAD).num_threads == 2
    beside_others = replace(CONFIG, core_share=CoreShare(count=2))
    assert rank_main._on_own_cores(beside_others, LOAD) is beside_others
    assert asked == [CoreShare(index=1, count=2)] * 2
    monkeypatch.setattr(rank_main, "keep_to_share", lambda _: None)
    assert rank_main._on_own_cores(CONFIG, LOAD) is CONFIG


@pytest.mark.parametrize(
    ("policy", "expected"), [(None, f"GOMP_SPINCOUNT={SPIN_ROUNDS}"), ("ACTIVE", "OMP_WAIT_POLICY=ACTIVE")]
)
def test_a_rank_s_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str | None, expected: str) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    written, exits = tmp_path / "variables", queue.Queue[tuple[int, RankExit | None]]()
    monkeypatch.setattr(process_launcher, "PROGRAM", (sys.executable, "-c", WRITES_ITS_VARIABLES, str(written)))
    launcher = RankProcesses()
    launcher.launch([setup_of(0)], lambda rank, how: exits.put((rank, how)))
    assert exits.get(timeout=120) == (0, None)
    launcher.close()
    assert written.read_text() == expected


@pytest.mark.parametrize(
    ("num_bundles", "told"), [(None, "runs in no placement group"), (2, "of 2 bundles"), (4, "of 4 bundles")]
)
def test_a_placement_group_of_the_wrong_size(
    monkeypatch: pytest.MonkeyPatch, num_bundles: int | None, told: str
) -> None:
    """Each rank has a bundle, and so has the worker."""
    group = None if num_bundles is None else SimpleNamespace(bundle_count=num_bundles)
    monkeypatch.setattr(actor_launcher, "get_current_placement_group", lambda: group)
    launcher = RankActors()
    with pytest.raises(ConfigError, match=f"{told}; 2 ranks as Ray actors need 3 bundles"):
        launcher.launch([setup_of(0), setup_of(1)], lambda rank, how: None)
    launcher.kill()
    launcher.close()


def test_bundles_without_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle is named; `test_gpus` has what may be wrong with a grant."""
    bundles = [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": gpu} for gpu in (1.0, 0.5)]]
    group = SimpleNamespace(bundle_count=3, bundle_specs=bundles)
    monkeypatch.setattr(actor_launcher, "get_current_placement_group", lambda: group)
    on_gpus = replace(CONFIG, model=replace(CONFIG.model, device="cuda"))
    with pytest.raises(
        ConfigError, match=r"Bundle 2 of .*: Ray grants 0\.5 GPUs, and each of 2 ranks needs a whole one"
    ):
        RankActors().launch([replace(setup_of(rank), config=on_gpus) for rank in range(2)], lambda rank, how: None)


@pytest.fixture
def lines_of_ranks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], list[dict[str, Any]]]:
    """What two ranks write on standard error while they start."""
    in_json = config(tiny_model, log_format="json", device="cpu")
    monkeypatch.setattr(group, "process_name", lambda: "worker/abc")

    def start(what_they_do: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(process_launcher, "PROGRAM", (sys.executable, "-P", "-c", RANK.format(what_they_do)))
        executor = RanksExecutor(in_json, process_launcher.RankProcesses)
        executor.start()
        executor.shutdown()
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]  # nothing but JSON
        said = [line for line in lines if line["process"].startswith("rank/")]
        return [line for line in said if "compil" not in line["message"].lower()]  # where no kernel is compiled yet

    return start


def test_every_line_of_a_rank_is_json_with_its_rank_and_worker(lines_of_ranks: Any) -> None:
    lines = lines_of_ranks(TALK)
    origins = {(line["process"], line["rank"], line["worker"]) for line in lines}
    assert origins == {("rank/0", 0, "abc"), ("rank/1", 1, "abc")}
    assert len({line["pid"] for line in lines}) == 2
    for rank in (0, 1):
        own, others, warning, uncaught = [line for line in lines if line["rank"] == rank]
        assert (own["level"], own["logger"], own["message"]) == ("INFO", "transom.worker", "own")
        assert (others["level"], others["logger"], others["message"]) == ("WARNING", "another", "others")
        assert (warning["level"], warning["logger"]) == ("WARNING", "py.warnings")
        assert "UserWarning: old" in warning["message"]
        assert (uncaught["level"], uncaught["logger"]) == ("CRITICAL", "transom")
        assert "ZeroDivisionError" in uncaught["exception"]


def config(model: Path | str, **settings: object) -> EngineConfig:
    values = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "tensor_parallel_size": 2, **settings}
    return Settings.parse(model=str(model), **values).engine_config()


@pytest.mark.parametrize(
    ("driver", "visible", "expected"),
    [
        (driver_of(*several(8)), None, ["0", "1"]),
        (driver_of(*several(8)), "7,0,3", ["7", "0"]),
        (driver_of(*several(8)), "GPU-5,GPU-2", ["GPU-5", "GPU-2"]),
        (DIVIDED, "MIG-part-3,MIG-part-1", ["MIG-part-3", "MIG-part-1"]),
        (NO_DRIVER, None, ["0", "1"]),  # NVML is missing: each rank finds out by itself
        (NO_DRIVER, "4", ["4", ""]),
        (driver_of(H100), None, "--tensor-parallel-size 2 needs 2 GPUs and this machine has 1;"),
        (DIVIDED, None, "this machine has 1;"),
    ],
)
def test_the_gpu_of_each_process(
    monkeypatch: pytest.MonkeyPatch, driver: GpuDriver, visible: str | None, expected: list[str] | str
) -> None:
    host(monkeypatch, driver, visible)
    asked = config("m", device="cuda")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            process_launcher._environments(asked, 2)
    else:
        environments = process_launcher._environments(asked, 2)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == expected


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which ranks on fake GPUs leave a file: its name is the GPU's UUID, its content CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(process_launcher, "PROGRAM", (sys.executable, "-m", "tests.fake_gpus"))
    yield tmp_path
    assert not left_behind(os.getpid())


def test_ranks_start_on_gpus_of_their_own(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, started: Path) -> None:
    """The driver reports all GPUs of the host to each of them."""
    driver = driver_of(*several(8))
    host(monkeypatch, driver)
    monkeypatch.setenv(fake_gpus.VARIABLE, fake_gpus.described(driver, started))
    ranks = RanksExecutor(resolve_for_device(config(tiny_model)), RankProcesses)
    ranks.start()
    ranks.shutdown()
    assert {path.name: path.read_text() for path in started.iterdir()} == {"GPU-0": "0", "GPU-1": "1"}


def test_a_rank_whose_gpu_fails_at_the_start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, started: Path) -> None:
    driver = driver_of(*several(8))
    host(monkeypatch, driver)
    monkeypatch.setenv(fake_gpus.VARIABLE, fake_gpus.described(driver, started, broken="GPU-1"))
    with pytest.raises(ConfigError, match=r"^Rank 1 of 2: CUDA cannot use the GPU GPU-1: CUDA error: .* busy or"):
        RanksExecutor(resolve_for_device(config(tiny_model)), RankProcesses).start()


def test_two_ranks_with_one_gpu() -> None:
    """As where Ray is told not to set CUDA_VISIBLE_DEVICES: every rank would take the first GPU."""
    hellos = [Hello("host", "10.0.0.1", rank, gpu) for rank, gpu in enumerate(["GPU-1", "GPU-0", "GPU-1"])]
    group = SimpleNamespace(size=3, receive=lambda deadline_s: (3 - len(hellos), hellos.pop(0)))
    with pytest.raises(ConfigError, match=r"Ranks 0 and 2 of 3 both have the GPU GPU-1 of 10.0.0.1; .*NOSET"):
        start_ranks(group, timeout_s=1.0)  # type: ignore[arg-type]


def test_a_failed_rank_ends_even_if_rays_kill_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(rank_main, "run_rank", lambda setup, ip: None)
    monkeypatch.setattr(actor_launcher, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actor_launcher, "KILL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    setup: Any = None
    RankActor().run(setup)
    assert ended.wait(60)


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """The cluster: a head without GPUs, and two nodes; ranks leave a file for their GPU in the folder."""

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


def start_in_group(model: Path, strategy: str) -> str:
    """Start a worker of two ranks in a placement group; return why that failed."""
    on_gpus = config(model, device="cuda")
    on_gpus = replace(on_gpus, ranks=replace(on_gpus.ranks, launcher="ray"))
    group = placement_group([{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2], strategy=strategy)
    in_group = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    worker = Worker.options(num_cpus=1, scheduling_strategy=in_group).remote()  # type: ignore[attr-defined]
    try:
        return str(ray.get(worker.start_ranks.remote(on_gpus), timeout=300))
    finally:
        ray.kill(worker)
        remove_placement_group(group)


@pytest.mark.exhaustive
@pytest.mark.serve
def test_ranks_over_placement_groups(tiny_model: Path, cluster: Path) -> None:
    assert start_in_group(tiny_model, "STRICT_SPREAD") == ""  # the worker itself runs at the head, which has no GPU
    assert {path.name for path in cluster.iterdir()} == {"GPU-a0", "GPU-b0"}
    for path in cluster.iterdir():
        assert path.read_text() == "0"
        path.unlink()
    assert start_in_group(tiny_model, "PACK") == ""
    found = {path.name: path.read_text() for path in cluster.iterdir()}
    assert found in ({"GPU-a0": "0", "GPU-a1": "1"}, {"GPU-b0": "0", "GPU-b1": "1"})
