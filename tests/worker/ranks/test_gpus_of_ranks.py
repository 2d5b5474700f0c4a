"""Each rank has a GPU of its own, and what is wrong with it is said in one line; on GPUs that are not there (`fake_gpus`)."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import fake_gpus
from tests.fake_gpus import H100, driver_of, install, part, several
from tests.worker.ranks.rank_watch import left_behind
from transom_core.config import EngineConfig
from transom_core.errors import ConfigError
from transom_core.machine.gpus import NO_DRIVER, GpuDriver
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import resolve_for_device
from transom_worker.execution.ranks import process_launcher
from transom_worker.execution.ranks.messages import Hello
from transom_worker.execution.ranks.process_launcher import RankProcesses
from transom_worker.execution.ranks.rank_startup import start_ranks
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

DIVIDED = driver_of(replace(H100, parts=(part(1), part(2), part(3))))


def config(model: Path | str, **settings: object) -> EngineConfig:
    values = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "tensor_parallel_size": 2, **settings}
    return Settings.parse(model=str(model), **values).engine_config()


def see(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


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
    install(driver, monkeypatch.setattr)
    see(monkeypatch, visible)
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


@pytest.mark.parametrize(
    ("driver", "visible", "expected"),
    [
        (driver_of(*several(8)), None, {"GPU-0": "0", "GPU-1": "1"}),
        pytest.param(
            DIVIDED,
            "MIG-part-3,MIG-part-1",
            {"MIG-part-3": "MIG-part-3", "MIG-part-1": "MIG-part-1"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_ranks_start_on_gpus_of_their_own(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: Path,
    driver: GpuDriver,
    visible: str | None,
    expected: dict[str, str],
) -> None:
    """The driver reports all GPUs of the host to each of them."""
    install(driver, monkeypatch.setattr)
    see(monkeypatch, visible)
    monkeypatch.setenv(fake_gpus.VARIABLE, fake_gpus.described(driver, started))
    ranks = RanksExecutor(resolve_for_device(config(tiny_model)), RankProcesses)
    ranks.start()
    ranks.shutdown()
    assert {path.name: path.read_text() for path in started.iterdir()} == expected


def test_a_rank_whose_gpu_fails_at_the_start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, started: Path) -> None:
    driver = driver_of(*several(8))
    install(driver, monkeypatch.setattr)
    see(monkeypatch, None)
    monkeypatch.setenv(fake_gpus.VARIABLE, fake_gpus.described(driver, started, broken="GPU-1"))
    with pytest.raises(ConfigError, match=r"^Rank 1 of 2: CUDA cannot use the GPU GPU-1: CUDA error: .* busy or"):
        RanksExecutor(resolve_for_device(config(tiny_model)), RankProcesses).start()


def test_two_ranks_with_one_gpu() -> None:
    """As where Ray is told not to set CUDA_VISIBLE_DEVICES: every rank would take the first GPU."""
    hellos = [Hello("host", "10.0.0.1", rank, gpu) for rank, gpu in enumerate(["GPU-1", "GPU-0", "GPU-1"])]
    group = SimpleNamespace(size=3, receive=lambda deadline_s: (3 - len(hellos), hellos.pop(0)))
    with pytest.raises(ConfigError, match=r"Ranks 0 and 2 of 3 both have the GPU GPU-1 of 10.0.0.1; .*NOSET"):
        start_ranks(group, timeout_s=1.0)  # type: ignore[arg-type]
