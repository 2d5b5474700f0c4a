"""`gpu.sh` as a program: its parts fit their time, one that fails costs no other, and tests that passed are not run again."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import resumed_tests

ROOT = Path(__file__).parents[2]
# Stands for the interpreter: writes what it is asked for, and fails where it is asked for $FAILING.
STUB = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in *"$FAILING"*) exit 1 ;; esac
"""


def gpu_sh(tmp_path: Path, *parts: str, failing: str = "nothing") -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and the calls of the interpreter."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB)
    python.chmod(0o755)
    calls.write_text("")
    variables = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "CALLS": str(calls), "FAILING": failing}
    command = [str(ROOT / "benchmarks/gpu.sh"), *parts]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    asked = [call for call in calls.read_text().splitlines() if not call.startswith(("-c", "-m pip"))]
    return done.returncode, done.stdout + done.stderr, asked


def test_all_parts_fit_45_minutes(tmp_path: Path) -> None:
    code, printed, calls = gpu_sh(tmp_path)
    assert (code, printed.splitlines()[-1].partition(";")[0]) == (0, "Sound: tests families kernels models")
    budgets = [int(found[1]) for call in calls if (found := re.search(r"--budget-s (\d+)", call))]
    pytest_limits = [
        int(limit) for limit in re.findall(r"^    timeout (\d+)", (ROOT / "benchmarks/gpu.sh").read_text(), re.M)
    ]
    assert len(calls) - len(budgets) == len(pytest_limits) == 2
    assert sum(budgets) + sum(pytest_limits) < 45 * 60
    assert max(budgets) < 600
    assert budgets[0] + sum(pytest_limits) < 600  # the part `tests`


def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    code, printed, calls = gpu_sh(tmp_path, "families", "models", failing="benchmarks.gpu.families")
    assert (code, printed.splitlines()[-1]) == (1, "Not sound: families")
    assert [call.split()[1] for call in calls] == ["benchmarks.gpu.families", "benchmarks.gpu.models"]
    assert gpu_sh(tmp_path, "speed")[:2] == (2, "gpu.sh knows tests families kernels models, not speed\n")


def test_tests_that_passed_are_not_run_again(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRANSOM_PASSED_TESTS", str(tmp_path / "passed"))
    pytester.makepyfile(
        "import pathlib\ndef test_one(): pass\ndef test_two(): assert pathlib.Path('mended').exists()\ndef test_three(): pass"
    )

    def run(*arguments: str) -> tuple[dict[str, int], int]:
        done = pytester.runpytest_inprocess("-p", "benchmarks.gpu.resumed_tests", *arguments)
        return {kind: count for kind, count in done.parseoutcomes().items() if "warning" not in kind}, done.ret

    assert run("-k", "one or two") == ({"passed": 1, "failed": 1, "deselected": 1}, 1)
    Path("mended").touch()
    assert run() == ({"passed": 2, "deselected": 1}, 0)
    assert run() == ({"deselected": 3}, 0)
    monkeypatch.setattr(resumed_tests, "sources", lambda: "changed")
    assert run() == ({"passed": 3}, 0)
