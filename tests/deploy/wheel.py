"""This source as the wheel that every node installs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
TIMEOUT_S = 240


def build_wheel(folder: Path) -> Path:
    """The wheel's path in a folder that has no other; it is made without a package index."""
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT)
    (wheel,) = folder.glob("transom-*.whl")
    return wheel


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; AssertionError if it ends with an error."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
