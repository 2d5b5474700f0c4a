"""Ten minutes of mixed traffic, random kills and redeploys: no promise of docs/reliability.md breaks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINUTES = 10
LONGEST_S = 3000.0  # kills and redeploys take longer than planned where other tests share the cores


@pytest.mark.exhaustive
@pytest.mark.serve
@pytest.mark.timeout(LONGEST_S + 100)
def test_ten_minutes_of_kills_break_no_promise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.serving.soak", "--minutes", str(MINUTES)]
    command += ["--json", str(tmp_path / "soak.json")]
    soak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert soak.returncode == 0, soak.stdout[-6000:] + soak.stderr[-2000:]
