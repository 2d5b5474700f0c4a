"""A small case of every operator with checked kernels, which raise where they touch memory that is not theirs, and on processors
with narrower registers than this one's.

All cases run in one child process for each build: starting one takes longer than most of the cases.
"""

import os
import struct
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from tests.how_many import ALL_TESTS
from tests.matrices import some_daily
from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import cpu_kernel, object_code
from transom_kernels.cpu.launching import launch
from transom_kernels.cpu.target import CPU_VARIABLE, cpu_target, named_target
from transom_kernels.linear.cpu import method_of

# Test modules of operators, each with a `small_case`: those of every day, and those that reach memory in the same ways.
DAILY = ("block_copy_cpu", "kv_write", "linear_recurrence", "moe_cpu", "paged_attention")
OTHERS = (
    *("hyper_connections_cpu", "latent_attention", "linear_cpu", "lora", "policy_attention", "route"),
    *("sample_cpu", "short_convolution", "small_operators_cpu"),
)

# processor -> how it multiplies bfloat16 in linear layers
PROCESSORS = {
    "x86-64": "wide",
    "haswell": "wide",
    "alderlake": "wide",
    "skylake-avx512": "wide",
    "cascadelake": "wide",
    "cooperlake": "pairs",
    "znver4": "pairs",
    "neoverse-n1": "wide",
    "neoverse-v1": "pairs",
}


def small_cases() -> None:
    processor = os.environ.get(CPU_VARIABLE)
    if processor:
        assert method_of(torch.bfloat16) == PROCESSORS[processor]
    for module in (*DAILY, *OTHERS) if ALL_TESTS else DAILY:
        print(module)
        import_module(f"tests.kernels.test_{module}").small_case()
    if CHECKED:
        a_kernel_that_touches_other_memory_raises()


def run_in_child(program: str = f"from {__name__} import small_cases; small_cases()", **environment: str) -> None:
    """Run a program in a new process with these environment variables; fail with its output if it fails."""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def a_kernel_that_touches_other_memory_raises() -> None:
    x, out = torch.randn(20), torch.zeros(20)
    kernel = cpu_kernel("tests.kernels.double_kernel", "make_double")
    launch(kernel, 2, [x, out, 20])
    assert out.equal(2 * x)
    with pytest.raises(IndexError, match="accesses outside of its memory"):
        launch(kernel, 3, [x, out, 40])


@pytest.mark.timeout(1800)  # after a change to the compiler all kernels are compiled
def test_no_access_outside_of_its_memory() -> None:
    """The daily tests compile for a processor with AVX2 alone, so that one child process tests both."""
    run_in_child(TRANSOM_CHECKED_KERNELS="1", TRANSOM_CPU="" if ALL_TESTS else "haswell")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors(processor: str) -> None:
    other, own = named_target(processor), cpu_target()
    if other.x86 != own.x86:
        pytest.skip("code for it does not run here; `make test-arm` runs it in an emulator")
    names = ("avx2", "avx512", "bf16", "vnni", "amx", "avx_vnni")
    missing = [name for name in names if getattr(other, name) and not getattr(own, name)]
    if missing:
        pytest.skip(f"this processor has no {', '.join(missing)}")
    run_in_child(TRANSOM_CPU=processor)


# processor -> the bits of ARM's instruction that multiplies two vectors there (BFDOT, or FMLA by element), and those that tell it
INSTRUCTIONS = {"neoverse-v1": (0x6E40FC00, 0xFFE0FC00), "neoverse-n1": (0x4F801000, 0xFFC0F400)}


@pytest.mark.parametrize("processor", some_daily(INSTRUCTIONS, daily=["neoverse-v1"]))
def test_code_for_arm_is_compiled_ahead(processor: str) -> None:
    run_in_child(f"from {__name__} import products_are_one_instruction as test; test()", TRANSOM_CPU=processor)


def products_are_one_instruction() -> None:
    method, (bits, mask) = method_of(torch.bfloat16), INSTRUCTIONS[os.environ[CPU_VARIABLE]]
    sizes = dict(method=method, dtype="bf16", out_dtype="bf16", activation=None, registers=8)
    code = object_code(cpu_kernel("transom_kernels.linear.cpu_kernel", "make_linear", **sizes))
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    assert sum(word & mask == bits for word in words) > 300
