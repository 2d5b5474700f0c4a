"""Launches kernels on torch tensors: at once, and into the program that is being recorded.

    launch(kernel, num_items, [x, weight, x.shape[0], eps])

Arguments become words: a tensor its address, a float the bits of its float32. While a thread records (`record`), every launch also
becomes an instruction of the recorder's program.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import CpuKernel
from transom_kernels.cpu.pool import pool

Argument = int | float | torch.Tensor | None


DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # the names that kernels take


class Recorder(Protocol):
    """Takes down what a thread launches."""

    def add(
        self,
        kernel: CpuKernel,
        num_items: int | torch.Tensor,
        words: Sequence[int],
        arguments: Sequence[Argument],
        scratch_bytes: int,
    ) -> None:
        """Add an instruction."""

    def add_call(self, call: Callable[[], None]) -> None:
        """Add a call of Python code."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for an instruction's result, which later instructions of the program may use again once it is unused."""


class NotRecordable(Exception):
    """A function cannot become a program, because it reads computed values in Python."""


class _Local(threading.local):
    recorder: Recorder | None = None
    paused: bool = False  # inside of a Python call that is recorded as a whole


_local = _Local()


def launch(
    kernel: CpuKernel, num_items: int | torch.Tensor, arguments: Sequence[Argument], *, scratch_bytes: int = 0
) -> None:
    """Run a kernel over `num_items` items and wait for it. None becomes 0.

    `num_items` is a tensor of one int64 where a recorded program shall read the number anew in each replay. Each thread has
    `scratch_bytes` of memory of its own.

    Raises:
        IndexError: a checked kernel touched memory outside of its tensors.
    """
    words = [_word(argument) for argument in arguments]
    count = _read_int(num_items) if isinstance(num_items, torch.Tensor) else num_items
    ranges = [memory_of(argument) for argument in arguments if isinstance(argument, torch.Tensor)] if CHECKED else []
    if count:
        pool().run_one(kernel, count, words, ranges, scratch_bytes)
    if _local.recorder is not None and not _local.paused:
        _local.recorder.add(kernel, num_items, words, arguments, scratch_bytes)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for a result."""
    if _local.recorder is not None and not _local.paused:
        return _local.recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def host_call(call: Callable[[], None]) -> None:
    """Call Python code now, and in every replay of the program that is being recorded."""
    if _local.recorder is None or _local.paused:
        call()
        return
    _local.paused = True
    try:
        call()
    finally:
        _local.paused = False
    _local.recorder.add_call(call)


def refuse_recording(reason: str) -> None:
    """Do nothing, except while a program is recorded: operators call this where they read computed values in Python.

    Raises:
        NotRecordable: a program is being recorded.
    """
    if is_recording():
        raise NotRecordable(reason)


def is_recording() -> bool:
    """Whether this thread's launches are recorded."""
    return _local.recorder is not None and not _local.paused


def recording_paused() -> bool:
    """Whether this thread is inside of a Python call that is recorded as a whole."""
    return _local.paused


@contextmanager
def record(recorder: Recorder) -> Iterator[None]:
    """Within this context the thread's launches are added to the recorder."""
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = None


def float_bits(number: float) -> int:
    """The bits of a float32 as an argument word."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the whole memory that a tensor's storage has."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _read_int(tensor: torch.Tensor) -> int:
    """The value of an int64 tensor of one element, read without a torch operator, which a recording would refuse."""
    return ctypes.c_int64.from_address(tensor.data_ptr()).value


def _word(argument: Argument) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return float_bits(argument)
    return 0 if argument is None else argument
