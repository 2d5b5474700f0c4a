"""A small case of every operator with checked kernels, which raise where they touch memory that is not theirs, and on processors
with narrower registers than this one's.

All cases run in one child process for each build: starting one takes longer than most of the cases.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels import (
    test_block_copy_cpu,
    test_gated_mlp_cpu,
    test_hyper_connections_cpu,
    test_linear_cpu,
    test_logprobs,
    test_moe_cpu,
    test_quantised_linear_cpu,
    test_rms_norm_cpu,
    test_rotary_cpu,
    test_route_cpu,
    test_rows_cpu,
    test_sample_cpu,
)
from tests.kernels.checked import run_as, run_checked
from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch

MODULES = (
    test_block_copy_cpu,
    test_gated_mlp_cpu,
    test_hyper_connections_cpu,
    test_linear_cpu,
    test_logprobs,
    test_moe_cpu,
    test_quantised_linear_cpu,
    test_rms_norm_cpu,
    test_rotary_cpu,
    test_route_cpu,
    test_rows_cpu,
    test_sample_cpu,
)


def small_cases() -> None:
    for module in MODULES:
        print(module.__name__)
        module.small_case()
    if CHECKED:
        a_kernel_that_touches_other_memory_raises()


def a_kernel_that_touches_other_memory_raises() -> None:
    x, out = torch.randn(20), torch.zeros(20)
    kernel = cpu_kernel("tests.kernels.double_kernel", "make_double")
    launch(kernel, 2, [x, out, 20])
    assert out.equal(2 * x)
    with pytest.raises(IndexError, match="accesses outside of its memory"):
        launch(kernel, 3, [x, out, 40])


def test_no_access_outside_of_its_memory() -> None:
    run_checked(small_cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "alderlake", "skylake-avx512", "cascadelake", "cooperlake"])
def test_other_processors(processor: str) -> None:
    run_as(processor, small_cases)
