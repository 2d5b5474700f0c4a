"""What a rank is started with: cores of its own, the variables of OpenMP, and for Ray actors a placement group that fits."""

import queue
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from transom_core.config import CoreShare
from transom_core.errors import ConfigError
from transom_core.machine.openmp import SPIN_ROUNDS
from transom_core.settings.settings import Settings
from transom_worker.execution.ranks import actor_launcher, process_launcher, rank_main
from transom_worker.execution.ranks.actor_launcher import RankActors
from transom_worker.execution.ranks.launcher import RankExit
from transom_worker.execution.ranks.messages import Load, RankSetup
from transom_worker.execution.ranks.process_launcher import RankProcesses

CONFIG = Settings.parse(model="m", device="cpu", tensor_parallel_size=2).engine_config()
LOAD = Load("", ranks_on_host=2, index_on_host=1)
WRITES_ITS_VARIABLES = (
    "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text("
    "' '.join(f'{name}={os.environ[name]}' for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY') if name in os.environ))"
)


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
    """The bundle is named; `test_gpu_grant` has what may be wrong with a grant."""
    bundles = [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": gpu} for gpu in (1.0, 0.5)]]
    group = SimpleNamespace(bundle_count=3, bundle_specs=bundles)
    monkeypatch.setattr(actor_launcher, "get_current_placement_group", lambda: group)
    on_gpus = replace(CONFIG, model=replace(CONFIG.model, device="cuda"))
    with pytest.raises(
        ConfigError, match=r"Bundle 2 of .*: Ray grants 0\.5 GPUs, and each of 2 ranks needs a whole one"
    ):
        RankActors().launch([replace(setup_of(rank), config=on_gpus) for rank in range(2)], lambda rank, how: None)
