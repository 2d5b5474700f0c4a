"""Who computes an operator, torch or Triton, and what launching Triton kernels needs to know of where they run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, cast, get_args

if TYPE_CHECKING:
    import torch

KERNELS_VARIABLE = "TRANSOM_KERNELS"  # of the environment; `Kernels` says what it may be
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read by triton when a kernel is defined, hence once here too

# auto: Triton for CUDA tensors. reference: torch for all, to find out whether a kernel is to blame. interpreted: Triton for all,
# on CPUs in its interpreter, which is a thousand times slower: for tests.
Kernels = Literal["auto", "reference", "interpreted"]

_chosen: Kernels | None = None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether operators compute with their Triton kernels on this tensor and those beside it: the one place that decides.

    Raises:
        ValueError: the environment asks for something else than `Kernels`, or for an interpreter that is not there.
    """
    kernels = _chosen or _of_environment()
    if kernels == "reference":
        return False
    return has_triton() if tensor.device.type == "cuda" else kernels == "interpreted"


@contextmanager
def prefer(kernels: Kernels) -> Iterator[None]:
    """Within it operators compute so, in all threads of this process, whatever the environment says."""
    global _chosen
    _check(kernels, "prefer")
    before, _chosen = _chosen, kernels
    try:
        yield
    finally:
        _chosen = before


@cache
def has_triton() -> bool:
    """Whether Triton is installed; without it CUDA tensors take torch's path, which is told once."""
    if find_spec("triton") is not None:
        return True
    logging.getLogger("transom.worker").warning("Triton is not installed: attention and experts will be slow on CUDA.")
    return False


@cache
def _of_environment() -> Kernels:
    return _check(os.environ.get(KERNELS_VARIABLE, "auto"), KERNELS_VARIABLE)


def _check(kernels: str, source: str) -> Kernels:
    if kernels not in get_args(Kernels):
        raise ValueError(f"{source} is {kernels!r}; give one of {', '.join(get_args(Kernels))}.")
    if kernels == "interpreted" and not INTERPRETED:
        raise ValueError(f"{source} is 'interpreted', which needs TRITON_INTERPRET=1 before anything imports triton.")
    return cast(Kernels, kernels)


def next_power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << (number - 1).bit_length()


def split_width(width: int, *, least: int = 16) -> tuple[int, int]:
    """A width as a power of two and a padded rest (0: none): 80 is (64, 16), 128 is (128, 0), 192 is (128, 64)."""
    first = max(least, 1 << (width.bit_length() - 1))
    rest = max(0, width - first)
    return first, max(least, next_power_of_two(rest)) if rest else 0


def warps_for(elements: int) -> int:
    """Warps of a program that keeps so many elements in registers."""
    return min(16, max(1, elements // 512))
