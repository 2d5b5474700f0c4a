"""Launches kernels on torch tensors. While a program is recorded, a launch also becomes one of the program's instructions.

    launch(kernel, num_items, NormArguments(x=x, weight=weight, rows=x.shape[0], eps=eps))

Arguments become words (`arguments.py`): a tensor becomes its address, a float the bits of its float32. `program.py` records decode
steps, as CUDA graphs do on GPUs.
"""

import ctypes
from collections.abc import Sequence

import torch

from transom_kernels.cpu.arguments import Arguments, words_of
from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import CpuKernel
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.recording import current_recorder

DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}  # dtype -> its name in kernels' parameters


def launch(
    kernel: CpuKernel,
    num_items: int | torch.Tensor,
    arguments: Arguments,
    *,
    scratch_bytes: int = 0,
    linked: Sequence[tuple[int, int]] = (),
) -> None:
    """Run a kernel over `num_items` work items and wait for it. An argument None becomes the word 0.

    `num_items` may be a tensor of one int64: a recorded program then reads the number in each replay. Each thread gets
    `scratch_bytes` of memory of its own. `linked` lists, as (address, bytes), memory that the kernel finds by addresses inside its
    tensors; only checked kernels need it.

    Raises:
        IndexError: a checked kernel touched memory outside its tensors.
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
    """Return uninitialised memory for a result; while a program is recorded, memory that the program owns."""
    recorder = current_recorder()
    if recorder is not None:
        return recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


# new launches use the last tensor; recorded programs may still use an earlier one, so none is freed
_counters = [torch.zeros(64, dtype=torch.int64)]


def counters(num_rows: int) -> torch.Tensor:
    """Return zeros [at least `num_rows`] in which a kernel counts the finished pieces of each row. The kernel zeroes them again."""
    if len(_counters[-1]) < num_rows:
        _counters.append(torch.zeros(2 * num_rows, dtype=torch.int64))
    return _counters[-1]


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _read_int(tensor: torch.Tensor) -> int:
    """Return the value of an int64 tensor of one element, without `item()`, which a recording would refuse."""
    return ctypes.c_int64.from_address(tensor.data_ptr()).value
