"""The choice between torch and Triton: TRANSOM_KERNELS and `launch.prefer`."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from transom_kernels import launch
from transom_kernels.launch import INTERPRETED, prefer, uses_triton

interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
on_cpu = torch.zeros(1)


@interpreted
def test_the_switch_ends_with_its_block() -> None:
    with prefer("interpreted"):
        assert uses_triton(on_cpu)
        with prefer("reference"):
            assert not uses_triton(on_cpu)
        assert uses_triton(on_cpu)
    assert not uses_triton(on_cpu)


def asked(monkeypatch: pytest.MonkeyPatch, value: str, interpret: str) -> Any:
    """What the module that decides does in an environment: executed anew, for it reads what Triton reads when it is imported."""
    monkeypatch.setenv("TRANSOM_KERNELS", value)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    return runpy.run_path(launch.__file__)["uses_triton"](on_cpu)


@pytest.mark.parametrize(
    ("value", "interpret", "message"),
    [
        ("torch", "1", "TRANSOM_KERNELS is 'torch'; give one of auto, reference, interpreted"),
        ("interpreted", "0", "TRANSOM_KERNELS is 'interpreted', which needs TRITON_INTERPRET=1"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    value: str, interpret: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=message):
        asked(monkeypatch, value, interpret)


@pytest.mark.parametrize(
    ("value", "interpret", "chosen"), [("reference", "1", False), ("auto", "1", False), ("interpreted", "1", True)]
)
def test_the_environment_chooses(value: str, interpret: str, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, value, interpret) is chosen


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
