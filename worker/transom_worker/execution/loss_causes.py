"""Finds out why a step failed or a process ended (`errors.LossCause`), for the rule that blames requests."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import torch

from transom_core.errors import LossCause, StepFailed, WorkerLost
from transom_worker.execution.out_of_memory import is_out_of_memory

_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # a process that fails gets other signals
_DEVICE_WORDS = ("CUDA error", "cuBLAS error", "CUBLAS_STATUS", "NCCL error", "device-side assert")
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
_HOST_EVENTS = Path("/proc/vmstat")


def cause_of_error(error: BaseException) -> LossCause:
    """Return why a step failed that raised `error`."""
    if isinstance(error, StepFailed | WorkerLost):
        return error.loss_cause
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, torch.AcceleratorError) or any(word in str(error) for word in _DEVICE_WORDS):
        return "device_error"
    return "exception"


def cause_of_exit(code: int, *, num_out_of_memory: int) -> LossCause:
    """Return why a process ended that its parent has not ended. `code` is negative for a signal, as in `subprocess`.

    `num_out_of_memory` is `count_out_of_memory` from before the end: the kernel kills for want of memory with SIGKILL too.
    """
    if code >= 0 or -code not in _OUTSIDE:
        return "crash"
    has_less_memory = -code == signal.SIGKILL and count_out_of_memory() > num_out_of_memory
    return "out_of_memory" if has_less_memory else "killed"


def count_out_of_memory() -> int:
    """Return how many processes the kernel has killed for want of memory, in this control group or else on this host."""
    for path in (_CGROUP_EVENTS, _HOST_EVENTS):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
