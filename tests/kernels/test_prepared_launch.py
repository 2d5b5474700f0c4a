"""Prepared launches hand the compiled kernel what Triton's own launch hands it, and go through Triton where they must.

Kernels are compiled for a fake driver that notes what it is given: in a process of its own, for triton decides when a kernel is
defined whether it is interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.prepared_launches"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_later_launches_are_the_first_one_without_tritons_checks(noted: dict[str, Any]) -> None:
    first, again = noted["first"], noted["again"]
    assert first["binds"] == 1
    assert again["binds"] == 0
    assert again["arguments"] == first["arguments"]
    assert again["grid"] == [3, 1, 1]


def test_numbers_of_a_step_and_addresses_are_those_of_the_launch(noted: dict[str, Any]) -> None:
    other = noted["other numbers"]
    assert other["binds"] == 0
    assert other["arguments"] == [*noted["addresses of others"], 5, *noted["first"]["arguments"][3:]]


@pytest.mark.parametrize("why", ["unaligned", "profiled", "other dtype", "unknown version"])
def test_it_goes_through_triton(noted: dict[str, Any], why: str) -> None:
    assert noted[why]["binds"] == 1
    assert noted[why]["launches"] == 1


def test_an_unaligned_launch_does_not_change_later_ones(noted: dict[str, Any]) -> None:
    assert noted["after unaligned"]["binds"] == 0
    assert noted["after unaligned"]["kernel"] == noted["first"]["kernel"] != noted["unaligned"]["kernel"]
