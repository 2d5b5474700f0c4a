"""The wheel that every node installs: built and installed without a package index, it contains all of Transom."""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.deploy.wheel import PIP, ROOT, build_wheel, run

PACKAGES = {
    "transom_cluster": "cluster",
    "transom_core": "worker",
    "transom_worker": "worker",
    "transom_kernels": "kernels",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_has_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    for package, source in PACKAGES.items():
        modules = {str(path.relative_to(ROOT / source)) for path in (ROOT / source / package).rglob("*.py")}
        assert {name for name in names if name.startswith(package) and name.endswith(".py")} == modules


def test_an_environment_of_its_own_runs_it(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment, which alone would find the source folders."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-I", "-c", "import transom_cluster; print(transom_cluster.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    assert "0.1.0" in run(tmp_path / "venv/bin/transom", "version", cwd=tmp_path)
