"""The choice between torch and Triton: TRANSOM_KERNELS and `launch.prefer`. Kernels compile for GPUs that are not installed, within
their shared memory: one configuration each; all with `make test-compile`."""

import json
import os
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.compiled_cases import HELD
from transom_kernels import launch
from transom_kernels.launch import INTERPRETED, prefer, uses_triton

interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
on_cpu = torch.zeros(1)
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


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


def output_of(module: str, *arguments: str, **variables: str) -> str:
    """Return what a module of this folder prints in a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(output_of("prepared_launches", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


def test_later_launches_are_the_first_one_without_tritons_checks(noted: dict[str, Any]) -> None:
    first, again = noted["first"], noted["again"]
    assert (first["binds"], again["binds"]) == (1, 0)
    assert (again["arguments"], again["grid"]) == (first["arguments"], [3, 1, 1])


def test_numbers_of_a_step_and_addresses_are_those_of_the_launch(noted: dict[str, Any]) -> None:
    other = noted["other numbers"]
    assert other["binds"] == 0
    assert other["arguments"] == [*noted["addresses of others"], 5, *noted["first"]["arguments"][3:]]


@pytest.mark.parametrize("why", ["unaligned", "profiled", "other dtype", "unknown version"])
def test_it_goes_through_triton(noted: dict[str, Any], why: str) -> None:
    assert (noted[why]["binds"], noted[why]["launches"]) == (1, 1)


def test_an_unaligned_launch_does_not_change_later_ones(noted: dict[str, Any]) -> None:
    assert noted["after unaligned"]["binds"] == 0
    assert noted["after unaligned"]["kernel"] == noted["first"]["kernel"] != noted["unaligned"]["kernel"]


def compiled(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output_of("ahead_of_time", *arguments).splitlines()]


def check(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        print(kernel)  # registers and shared memory, with -s or on a failure
    assert [kernel for kernel in kernels if not kernel["fits"]] == []
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []


def check_attention(kernels: list[dict[str, Any]]) -> None:
    """In the inner loop, up to 18 instructions a score of a prompt (28 with a soft cap, or keys in two tiles); in decoding loads of
    three iterations."""
    attention = [kernel for kernel in kernels if kernel["name"].startswith(("attend bf16 fp32", "attend fp16 fp32"))]
    prompts = [kernel for kernel in attention if "block_m 128" in kernel["name"]]
    for kernel in prompts:
        is_long = "has_soft_cap True" in kernel["name"] or " d 192 " in kernel["name"]
        assert 0 < sum(kernel["loop"].values()) <= (28 if is_long else 18) * kernel["scores"], kernel
    decoding = [kernel for kernel in attention if "block_m 16 " in kernel["name"] and " d 512 " not in kernel["name"]]
    assert [kernel for kernel in decoding if max(kernel["buffers"], default=1) < 3 or max(kernel["waits"]) == 0] == []
    assert prompts
    assert decoding


def test_one_configuration_of_each_kernel_fits_hopper() -> None:
    kernels = compiled("sm_90", "--one-each")
    assert len(kernels) >= 18
    check(kernels)


@pytest.mark.compile
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_configuration_fits(arch: str) -> None:
    kernels = compiled(arch, *["--loops"] * (arch == "sm_90"))
    check(kernels)
    if arch == "sm_90":
        check_attention(kernels)


@pytest.mark.compile
@pytest.mark.parametrize(("rows", "most", "buffers"), [(16, 3.0, 4), (64, 3.5, 2), (128, 3.5, 2)])
def test_experts_take_few_instructions_a_weight(rows: int, most: float, buffers: int) -> None:
    """MXFP4, in the inner loop, whose loads are asynchronous. As Triton 3.6 compiles it, it waits after each product of 16 rows."""
    most += 0.4 if version("triton").startswith("3.6.") and rows == 16 else 0
    kernels = compiled("sm_90", "--loops", "_experts bf16", "has_bias True", f"block_m {rows} ")
    assert {kernel["types"]["out"] for kernel in kernels} == {"*bf16"}
    kernels = [kernel for kernel in kernels if kernel["constants"]["NUMBERS"]]
    assert len(kernels) == 2
    for kernel in kernels:
        check_products(kernel, most, buffers)


@pytest.mark.compile
def test_linear_layers_take_few_instructions_a_weight() -> None:
    """Of up to 16 rows, in the inner loop: 3.0 over four bits and over int8, 3.3 where each 32 weights have a scale and a zero, 3.8
    over fp8, whose bits lie further apart."""
    kernels = compiled("sm_90", "--loops", "is_dense True", "block_m 16 ")
    assert len(kernels) == len(HELD)
    for kernel in kernels:
        kind = kernel["constants"]
        most = 3.8 if kind["NUMBERS"] == "fp8" else 3.3 if kind["HAS_ZEROS"] and kind["GROUP"] == 32 else 3.0
        check_products(kernel, most, buffers=3)


def check_products(kernel: dict[str, Any], most: float, buffers: int) -> None:
    """`most` instructions a weight in the inner loop, whose loads are asynchronous, into so many buffers."""
    tile, loop = kernel["constants"], kernel["loop"]
    assert sum(loop.values()) / (tile["BLOCK_N"] * tile["BLOCK_J"] / (32 * tile["num_warps"])) <= most
    assert "HGMMA" in loop
    assert "LDG" not in loop
    assert min(kernel["buffers"]) >= buffers
