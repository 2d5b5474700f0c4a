"""The recorder of the current thread, to which the launches and Python calls of a decode step are added (`program.py`).

This module does not import the kernel compiler, so that code that also runs on GPUs can import it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from transom_kernels.cpu.kernel import CpuKernel

Argument = int | float | torch.Tensor | None


class Recorder(Protocol):
    """Receives the launches and Python calls of a thread."""

    def add(
        self,
        kernel: CpuKernel,
        num_items: int | torch.Tensor,
        words: Sequence[int],
        tensors: Sequence[torch.Tensor],
        scratch_bytes: int,
    ) -> None:
        """Add a launch; `tensors` are those whose addresses are among `words`."""

    def add_call(self, call: Callable[[], object]) -> None:
        """Add a call of Python code."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a launch's result; later launches of the program may reuse it once the tensor is garbage-collected."""


class NotRecordable(Exception):
    """A function cannot become a program, because it reads computed values in Python."""


class _Local(threading.local):
    recorder: Recorder | None = None
    paused: bool = False  # True inside a Python call (`host_call`), which is recorded as a whole


_local = _Local()


def current_recorder() -> Recorder | None:
    """Return the recorder of this thread's launches; None if they are not recorded."""
    return None if _local.paused else _local.recorder


@contextmanager
def record(recorder: Recorder) -> Iterator[None]:
    """Add this thread's launches and calls to the recorder within this context."""
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = None


def host_call(call: Callable[[], object]) -> None:
    """Call Python code now, and in every replay of the program that is being recorded."""
    recorder = current_recorder()
    if recorder is None:
        call()
        return
    _local.paused = True
    try:
        call()
    finally:
        _local.paused = False
    recorder.add_call(call)


def refuse_recording(reason: str) -> None:
    """Raise if a program is being recorded. Operators call this before they read computed values in Python.

    Raises:
        NotRecordable: a program is being recorded.
    """
    if current_recorder() is not None:
        raise NotRecordable(reason)
