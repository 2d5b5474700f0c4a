"""Decides whether torch, Triton or a CPU kernel computes an operator, and helps to choose the sizes of Triton launches.

The environment variable TRANSOM_KERNELS chooses:

    auto         Triton for CUDA tensors, compiled CPU kernels for CPU tensors, torch if there is no kernel (default)
    reference    torch for all tensors: to find out whether a kernel causes a wrong result
    interpreted  Triton for all tensors, on CPUs in Triton's interpreter, which is a thousand times slower: for tests
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch

KERNELS_VARIABLE = "TRANSOM_KERNELS"
# Triton reads this variable once, when a kernel is defined, and so does this module
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Kernels = Literal["auto", "reference", "interpreted"]

_chosen: Kernels | None = None
_pretended: tuple[int, int] | None = None  # the compute capability of an absent GPU; see `absent_device`

MULTIPROCESSORS = 132  # of an H100 and an H200
# The most registers that a thread can have. Without this limit ptxas, CUDA's assembler, spills one or two of them so that one more
# program fits on a multiprocessor.
MAX_REGISTERS = 255
# compute capability -> bytes of shared memory that a program may have; for devices for which kernels are compiled ahead of time
SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels compute an operator whose call has this tensor. Every operator with a Triton kernel calls this.

    Raises:
        ValueError: TRANSOM_KERNELS has an unknown value, or asks for an interpreter that is not loaded.
    """
    kernels = _chosen or _of_environment()
    if kernels == "reference":
        return False
    return has_triton() if tensor.is_cuda or _pretended else kernels == "interpreted"


def uses_cpu_kernels(tensor: torch.Tensor) -> bool:
    """Return whether compiled CPU kernels compute the operators on this tensor that have one; torch computes all others.

    Raises:
        ValueError: TRANSOM_KERNELS has an unknown value, or asks for an interpreter that is not loaded.
    """
    if _pretended or tensor.device.type != "cpu":
        return False
    return (_chosen or _of_environment()) == "auto" and has_cpu_kernels()


def kernels_on(device: torch.device) -> str:
    """Return what computes operators on a device: "triton", "cpu" (compiled CPU kernels) or "torch"."""
    tensor = torch.empty(0, device=device)
    return "triton" if uses_triton(tensor) else "cpu" if uses_cpu_kernels(tensor) else "torch"


def compiles_by_rows(device: torch.device) -> bool:
    """Return whether another number of rows compiles kernels again, at their first launch: on GPUs, where tiles depend on rows."""
    return device.type == "cuda" or _pretended is not None


def pretend(capability: tuple[int, int] | None) -> None:
    """Make operators launch their GPU kernels on CPU tensors, as on a device of this compute capability; None ends that."""
    global _pretended
    _pretended = capability


def compile_seconds() -> float:
    """Return the seconds that this process has spent compiling CPU kernels; 0 if the cache had all of them."""
    if not has_cpu_kernels():
        return 0.0
    from transom_kernels.cpu.kernel import statistics

    return statistics.compile_s


@contextmanager
def compile_news(on_compiled: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `on_compiled` on the compiling thread after each compiled kernel, of Triton or for CPUs."""
    _tell(on_compiled)
    try:
        yield
    finally:
        _tell(None)


def _tell(on_compiled: Callable[[], None] | None) -> None:
    if has_triton():
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = None if on_compiled is None else lambda **_: on_compiled()
    if has_cpu_kernels():
        from transom_kernels.cpu.kernel import statistics

        statistics.on_compiled = on_compiled


@contextmanager
def prefer(kernels: Kernels) -> Iterator[None]:
    """Use `kernels` instead of TRANSOM_KERNELS within this context, for all operators in all threads of the process."""
    global _chosen
    _check(kernels, "prefer")
    before, _chosen = _chosen, kernels
    try:
        yield
    finally:
        _chosen = before


@cache
def has_triton() -> bool:
    """Return whether Triton is installed. If not, torch computes on CUDA tensors, which is logged once."""
    if find_spec("triton") is not None:
        return True
    logging.getLogger("transom.worker").warning("Triton is not installed: attention and experts will be slow on CUDA.")
    return False


@cache
def has_cpu_kernels() -> bool:
    """Return whether CPU kernels can be compiled and run on this processor. If not, torch computes, which is logged once."""
    try:
        from transom_kernels.cpu.pool import pool

        pool()
    except Exception as error:  # no numba, no compiler for this processor, or no futex: torch computes
        logging.getLogger("transom.worker").warning(
            "CPU kernels cannot be used, so torch computes, which is slower: %s: %s", type(error).__name__, error
        )
        return False
    return True


@cache
def _of_environment() -> Kernels:
    return _check(os.environ.get(KERNELS_VARIABLE, "auto"), KERNELS_VARIABLE)


def _check(kernels: str, source: str) -> Kernels:
    if kernels not in get_args(Kernels):
        raise ValueError(f"{source} is {kernels!r}; give one of {', '.join(get_args(Kernels))}.")
    if kernels == "interpreted" and not INTERPRETED:
        raise ValueError(f"{source} is 'interpreted', which needs TRITON_INTERPRET=1 before anything imports triton.")
    return cast(Kernels, kernels)


@cache
def implementation(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of `transom_kernels` that may need Triton.

    It is imported once, here: an import statement would cost every call of an operator a microsecond.
    """
    return cast(Callable[..., Any], getattr(import_module(f"transom_kernels.{module}"), name))


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def split_width(width: int) -> tuple[int, int]:
    """Split a width into a power of two and a remainder padded to 16 or more (0: none): 80 is (64, 16), 192 is (128, 64)."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = max(0, width - first)
    return first, max(16, next_power_of_two(rest)) if rest else 0


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) for other devices."""
    return _pretended or _capability_of(device)


@cache
def _capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have: 99 KiB on an L4, 227 KiB on an H100, 0 without CUDA."""
    return SHARED_BYTES[_pretended] if _pretended else _shared_bytes(device)


@cache
def _shared_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 0)


@cache
def multiprocessors_of(device: torch.device) -> int:
    """Return the streaming multiprocessors of a CUDA device; `MULTIPROCESSORS` for other devices."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else MULTIPROCESSORS


def warps_for(elements: int) -> int:
    """Return the warps of a program that keeps `elements` elements in registers: 16 for each of a warp's 32 threads."""
    return min(16, max(1, elements // 512))
