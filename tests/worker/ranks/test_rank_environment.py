"""The OpenMP variables that a rank's process is started with."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from transom_core.machine.openmp import SPIN_ROUNDS
from transom_core.settings.settings import Settings
from transom_worker.execution.ranks import process_launcher
from transom_worker.execution.ranks.launcher import RankExit
from transom_worker.execution.ranks.messages import RankSetup
from transom_worker.execution.ranks.process_launcher import RankProcesses

WRITES_ITS_VARIABLES = (
    "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text("
    "' '.join(f'{name}={os.environ[name]}' for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY') if name in os.environ))"
)


@pytest.mark.parametrize(
    ("policy", "expected"), [(None, f"GOMP_SPINCOUNT={SPIN_ROUNDS}"), ("ACTIVE", "OMP_WAIT_POLICY=ACTIVE")]
)
def test_a_rank_s_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str | None, expected: str) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    config = Settings.parse(model="m", device="cpu").engine_config()
    setup = RankSetup(config=config, rank=0, size=1, endpoint="", server_key=b"")
    written, exits = tmp_path / "variables", queue.Queue[tuple[int, RankExit | None]]()
    monkeypatch.setattr(process_launcher, "PROGRAM", (sys.executable, "-c", WRITES_ITS_VARIABLES, str(written)))
    launcher = RankProcesses()
    launcher.launch([setup], lambda rank, how: exits.put((rank, how)))
    assert exits.get(timeout=120) == (0, None)
    launcher.close()
    assert written.read_text() == expected
