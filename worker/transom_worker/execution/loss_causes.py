"""Finds out why a step failed or a process ended (`errors.LossCause`), by which failover decides whether a request may be to
blame."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import torch

from transom_core.errors import LossCause, StepFailed, WorkerLost
from transom_worker.execution.out_of_memory import is_out_of_memory

# Signals that come from outside; a process that fails by itself ends by others.
_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_DEVICE_WORDS = ("CUDA error", "cuBLAS error", "CUBLAS_STATUS", "NCCL error", "device-side assert")
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")
_HOST_EVENTS = Path("/proc/vmstat")


def cause_of_error(error: BaseException) -> LossCause:
    """Return why a step failed, by the error that it raised."""
    if isinstance(error, StepFailed | WorkerLost):
        return error.loss_cause
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, torch.AcceleratorError) or any(word in str(error) for word in _DEVICE_WORDS):
        return "device_error"
    return "exception"


def cause_of_exit(code: int, *, num_out_of_memory: int) -> LossCause:
    """Return why a child process ended that its parent did not end. `code` is negative for a signal, as in `subprocess`.

    `num_out_of_memory` is an earlier `count_out_of_memory()`: the kernel's OOM killer sends SIGKILL too, and raises that count.
    """
    if code >= 0 or -code not in _OUTSIDE:
        return "crash"
    has_less_memory = -code == signal.SIGKILL and count_out_of_memory() > num_out_of_memory
    return "out_of_memory" if has_less_memory else "killed"


def count_out_of_memory() -> int:
    """Return how many processes the kernel's OOM killer has ended, in this control group or else on this host."""
    for path in (_CGROUP_EVENTS, _HOST_EVENTS):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
