"""What nodes install: the Dockerfile, as far as its text shows, and the wheel, built and installed without a package index."""

import re
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.deploy.deploy_files import DEPLOY
from tests.deploy.wheel import PIP, ROOT, build_wheel, run

INSTRUCTION = re.compile(r"^(FROM|ARG|ENV|RUN|COPY|USER|WORKDIR|EXPOSE|ENTRYPOINT|CMD) (.+)$")


def instructions() -> list[tuple[str, str]]:
    """Each with its arguments; lines that go on are one."""
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [_instruction(line) for line in lines if line and not line.startswith("#")]


def _instruction(line: str) -> tuple[str, str]:
    found = INSTRUCTION.match(line)
    assert found, f"no instruction: {line}"
    return found[1], found[2]


def copied() -> set[str]:
    """What comes from the source folder."""
    copies = [arguments.split() for name, arguments in instructions() if name == "COPY" and "--from" not in arguments]
    return {source for *sources, _ in copies for source in sources}


def test_it_copies_what_is_there_and_what_the_wheel_needs() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {Path(path).parts[0] for path in build["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert packages | {"pyproject.toml", build["project"]["readme"], *build["project"]["license-files"]} <= copied()
    assert all((ROOT / source).exists() for source in copied())


def test_nothing_else_is_sent_to_the_builder() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied()


def test_the_last_stage_runs_as_a_user() -> None:
    names = [name for name, _ in instructions()]
    assert [arguments for name, arguments in instructions() if name == "USER"] == ["1000"]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("FROM", "RUN", "COPY"))


def test_the_last_stage_has_a_compiler_for_triton() -> None:
    *_, last = [i for i, (name, _) in enumerate(instructions()) if name == "FROM"]
    installed = " ".join(arguments for name, arguments in instructions()[last:] if name == "RUN")
    assert {"gcc", "libc6-dev"} <= set(installed.split())


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
