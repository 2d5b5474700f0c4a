"""constraints.txt can be installed: its Triton is the one that its torch requires, and an index resolves all pins."""

import os
import shutil
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lock_script() -> ModuleType:
    loader = SourceFileLoader("lock", str(ROOT / "scripts" / "lock"))
    spec = spec_from_loader("lock", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_triton_is_the_release_that_torch_requires():
    assert pins()["triton"] == lock_script().triton_for(pins()["torch"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", [(), ("--extra", "dev")], ids=["runtime", "dev"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_an_index_resolves_the_pins(python, extra):
    """Metadata alone is read. Local wheels are left out: a CPU build of torch requires no Triton and hides a conflict."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    local = ("PIP_", "UV_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(local)}
    command = ["uv", "pip", "compile", "pyproject.toml", "-c", "constraints.txt", "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--no-config", "--quiet", *extra]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if "failed to fetch" in result.stderr.lower() or "error sending request" in result.stderr.lower():
        pytest.skip("no package index can be reached")
    assert result.returncode == 0, result.stderr
    assert f"triton=={pins()['triton']}" in result.stdout
