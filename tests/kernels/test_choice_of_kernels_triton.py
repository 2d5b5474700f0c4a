"""The choice between torch and Triton: TRANSOM_KERNELS, `launch.prefer`, and operators that obey them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch

from transom_kernels import launch
from transom_kernels.block_copy import block_copy, block_copy_between
from transom_kernels.block_copy.op import block_copy_reference
from transom_kernels.launch import INTERPRETED, prefer, uses_triton

interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
on_cpu = torch.zeros(1)


def test_cpus_use_torch_unless_tests_ask() -> None:
    assert not uses_triton(on_cpu)
    with prefer("reference"):
        assert not uses_triton(on_cpu)


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


def test_a_process_does_as_its_environment_says() -> None:
    code = "import torch; from transom_kernels.launch import uses_triton; print(uses_triton(torch.zeros(1)))"
    environment = os.environ | {"TRANSOM_KERNELS": "interpreted", "TRITON_INTERPRET": "1"}
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (made.stdout, made.returncode) == ("True\n", 0), made.stderr


@interpreted
@pytest.mark.parametrize("pairs", [[], [(0, 1)], [(0, 3), (0, 4), (3, 5)], [(0, 1), (2, 0), (1, 4), (4, 2), (0, 0)]])
def test_copies_that_wait_for_each_other(pairs: list[tuple[int, int]]) -> None:
    blocks = torch.randint(0, 256, (6, 20), dtype=torch.uint8)
    wanted = blocks.clone()
    block_copy_reference(wanted, pairs)
    with prefer("interpreted"):
        block_copy(blocks, pairs)
    assert blocks.equal(wanted)


PAIRS_BETWEEN = [(0, 1), (1, 2), (2, 3), (5, 1), (5, 0)]


@pytest.mark.parametrize("kernels", ["reference", "auto", pytest.param("interpreted", marks=interpreted)])
@pytest.mark.parametrize("num_bytes", [20, 21])  # words, and bytes that are no words
def test_copies_between_two_memories(kernels: launch.Kernels, num_bytes: int) -> None:
    source, wanted = (torch.randint(0, 256, (6, 24), dtype=torch.uint8)[:, :num_bytes] for _ in range(2))
    got = wanted.clone()
    for first, to in PAIRS_BETWEEN:
        wanted[to] = source[first]
    with prefer(kernels):
        block_copy_between(source, got, PAIRS_BETWEEN)
        assert got.equal(wanted)
        for pair in [(6, 0), (0, 6), (-1, 0)]:
            with pytest.raises(ValueError, match="leaves the 6 and 6 block ids"):
                block_copy_between(source, got, [pair])
        with pytest.raises(ValueError, match="cannot be copied to blocks"):
            block_copy_between(source, got[:, 1:], [(0, 0)])
