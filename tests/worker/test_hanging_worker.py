"""A worker that hangs ends its process, whether other Python threads can run or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from transom_worker.replica import HUNG_EXIT_CODE


@pytest.mark.parametrize(
    ("how", "code", "printed"),
    [
        pytest.param("without the lock", HUNG_EXIT_CODE, "EngineDead hung\n", marks=pytest.mark.exhaustive),
        ("with the lock", 1, ""),  # no code of Python ran any more, so routers see the connection break
    ],
)
def test_a_worker_that_hangs_ends(tiny_model: Path, how: str, code: int, printed: str) -> None:
    program = [sys.executable, "-m", "tests.worker.hanging_worker", str(tiny_model), how]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr[-4000:]
    assert "hanging_worker.py" in ended.stderr  # the stacks of all threads
    assert "in receive" in ended.stderr
