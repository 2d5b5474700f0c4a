"""The choice between torch and Triton: TRANSOM_KERNELS and `launch.prefer`."""

from __future__ import annotations

import runpy
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
