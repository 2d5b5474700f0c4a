"""Kernels compile for GPUs that are not installed, within their shared memory: one configuration each; all with `make test-
compile`.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiled_cases import HELD

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def compiled(*arguments: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1500,
        cwd=ROOT,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return [json.loads(line) for line in made.stdout.splitlines()]


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
        loop = kernel["loop"]
        assert instructions_a_weight(kernel) <= most
        assert "HGMMA" in loop
        assert "LDG" not in loop
        assert min(kernel["buffers"]) >= buffers


@pytest.mark.compile
def test_linear_layers_take_few_instructions_a_weight() -> None:
    """Of up to 16 rows, in the inner loop: 3.0 over four bits and over int8, 3.3 where each 32 weights have a scale and a zero, 3.8
    over fp8, whose bits lie further apart."""
    kernels = compiled("sm_90", "--loops", "is_dense True", "block_m 16 ")
    assert len(kernels) == len(HELD)
    for kernel in kernels:
        kind = kernel["constants"]
        most = 3.8 if kind["NUMBERS"] == "fp8" else 3.3 if kind["HAS_ZEROS"] and kind["GROUP"] == 32 else 3.0
        assert instructions_a_weight(kernel) <= most
        assert "HGMMA" in kernel["loop"]
        assert "LDG" not in kernel["loop"]
        assert min(kernel["buffers"]) >= 3


def instructions_a_weight(kernel: dict[str, Any]) -> float:
    tile = kernel["constants"]
    return sum(kernel["loop"].values()) / (tile["BLOCK_N"] * tile["BLOCK_J"] / (32 * tile["num_warps"]))
