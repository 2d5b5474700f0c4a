"""Runs a function of a test module in a child process whose kernels are checked, or compiled for another processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.how_many import ALL_TESTS
from transom_kernels.cpu.target import cpu_target, named_target


def run_in_child(case: Callable[[], None], **environment: str) -> None:
    """Run a module's function `case` in a new process with these environment variables; fail with its output if it fails."""
    program = f"from {case.__module__} import {case.__name__}; {case.__name__}()"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def run_checked(case: Callable[[], None]) -> None:
    """Run `case` with kernels that compare each access with the memory that their launch names.

    The daily tests compile them for a processor with AVX2 alone, so that one child process tests both.
    """
    run_in_child(case, TRANSOM_CHECKED_KERNELS="1", TRANSOM_CPU="" if ALL_TESTS else "haswell")


def run_as(processor: str, case: Callable[[], None]) -> None:
    """Run `case` with kernels compiled for another processor; skip the test where this one lacks its instructions."""
    other, own = named_target(processor), cpu_target()
    names = ("avx2", "avx512", "bf16", "vnni", "amx", "avx_vnni")
    missing = [name for name in names if getattr(other, name) and not getattr(own, name)]
    if missing:
        pytest.skip(f"this processor has no {', '.join(missing)}")
    run_in_child(case, TRANSOM_CPU=processor)
