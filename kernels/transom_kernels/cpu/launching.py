"""Launches kernels on torch tensors: at once, and into the program that is being recorded.

    launch(kernel, num_items, NormArguments(x=x, weight=weight, rows=x.shape[0], eps=eps))

Arguments become words (`arguments.py`): a tensor its address, a float the bits of its float32. Where a decode step is recorded
(`recording.py`), every launch also becomes an instruction of its program.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from transom_kernels.cpu.arguments import Arguments, words_of
from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import CpuKernel
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.recording import current_recorder

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # the names that kernels take


def launch(
    kernel: CpuKernel,
    num_items: int | torch.Tensor,
    arguments: Arguments,
    *,
    scratch_bytes: int = 0,
    linked: Sequence[tuple[int, int]] = (),
) -> None:
    """Run a kernel over `num_items` items and wait for it. None becomes 0.

    `num_items` is a tensor of one int64 where a recorded program shall read the number anew in each replay. Each thread has
    `scratch_bytes` of memory of its own. `linked` is memory whose addresses lie in tensors, as (address, bytes): checked kernels
    need to know it.

    Raises:
        IndexError: a checked kernel touched memory outside of its tensors.
    """
    words, tensors = words_of(arguments)
    count = _read_int(num_items) if isinstance(num_items, torch.Tensor) else num_items
    if count:
        ranges = [memory_of(tensor) for tensor in tensors] if CHECKED else []
        pool().run_one(kernel, count, words, [*ranges, *linked], scratch_bytes)
    recorder = current_recorder()
    if recorder is not None:
        recorder.add(kernel, num_items, words, tensors, scratch_bytes)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for a result."""
    recorder = current_recorder()
    if recorder is not None:
        return recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the whole memory that a tensor's storage has."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _read_int(tensor: torch.Tensor) -> int:
    """The value of an int64 tensor of one element, read without a torch operator, which a recording would refuse."""
    return ctypes.c_int64.from_address(tensor.data_ptr()).value
