"""What runs on a machine with a GPU imports only what that machine has and what `gpu_wheels` brings."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASSUMED = {
    name
    for line in (Path(__file__).parent / "gpu_machine.txt").read_text().splitlines()
    if not line.startswith("#")
    for name in line.split()
}
# Names of packages whose imports are called otherwise.
IMPORTED_AS = {"pydantic-core": ("pydantic_core",), "pyzmq": ("zmq",), "pytest-xdist": ("xdist",)}
OWN = {"transom_core", "transom_worker", "transom_kernels", "tests", "benchmarks"}
HARNESS = ("benchmarks.gpu.families", "benchmarks.gpu.models", "benchmarks.engine.kernels")

# Refuses what the machine lacks, as if it were not installed; names with an underscore belong to compiled parts of packages.
BLOCKER = """
import importlib, importlib.abc, importlib.util, os, sys, sysconfig
allowed = set(sys.argv[1].split())
installed = {name.split(".")[0].split("-")[0] for name in os.listdir(sysconfig.get_path("purelib"))}
find_spec = importlib.util.find_spec
def lacks(name):
    top = name.split(".")[0]
    return top in installed - allowed and not top.startswith("_")
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if lacks(name):
            raise ModuleNotFoundError(f"{name} is not on a machine with a GPU", name=name)
sys.meta_path.insert(0, Blocker())
importlib.util.find_spec = lambda name, package=None: None if lacks(name) else find_spec(name, package)
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def brought() -> set[str]:
    """The imports that `gpu_wheels` brings."""
    found = re.search(r'^names="([^"]+)"', (ROOT / "benchmarks/gpu_wheels").read_text(), re.MULTILINE)
    assert found is not None
    return {name for wheel in found[1].split() for name in IMPORTED_AS.get(wheel, (wheel.replace("-", "_"),))}


def gpu_tests() -> list[str]:
    """The modules of the tests that `gpu.sh` runs."""
    kernels = sorted((ROOT / "tests/kernels").glob("test_*.py"))
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.gpu\b", path.read_text())]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in dict.fromkeys([*kernels, *marked])]


def test_harness_and_tests_can_be_imported_there() -> None:
    allowed = " ".join(ASSUMED | brought() | OWN)
    command = [sys.executable, "-c", BLOCKER, allowed, *HARNESS, "tests.conftest", *gpu_tests()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
