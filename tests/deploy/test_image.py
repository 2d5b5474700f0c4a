"""The Dockerfile, as far as its text shows: it copies what the wheel needs, and nothing runs as root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.deploy.deploy_files import DEPLOY

ROOT = DEPLOY.parent
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
    users = [arguments for name, arguments in instructions() if name == "USER"]
    assert users == ["1000"]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("FROM", "RUN", "COPY"))


def test_the_last_stage_has_a_compiler_for_triton() -> None:
    *_, last = [i for i, (name, _) in enumerate(instructions()) if name == "FROM"]
    installed = " ".join(arguments for name, arguments in instructions()[last:] if name == "RUN")
    assert {"gcc", "libc6-dev"} <= set(installed.split())
