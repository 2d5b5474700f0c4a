"""Prometheus' own programs, for tests that run them where they are; no test downloads them."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240


def prometheus_program(name: str) -> str:
    """The path of `prometheus` or `promtool`; the test is skipped if this machine does not have it."""
    command: list[str | Path] = [ROOT / "scripts/prometheus", name, "--offline"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


def run_promtool(*arguments: str | Path) -> str:
    """What promtool prints; the test fails if promtool ends with an error, and is skipped without promtool."""
    command = [prometheus_program("promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
