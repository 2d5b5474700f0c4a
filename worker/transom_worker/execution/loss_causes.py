"""Finds out why a step failed or a process ended (`errors.LossCause`). Failover needs the cause to decide whether a request may be
to blame.

Torch and numpy report missing memory by several classes and texts:

    torch.OutOfMemoryError                 the allocator of CUDA devices
    MemoryError                            numpy and Python
    RuntimeError, by its text              torch's allocator on CPUs, CUDA's driver, cuBLAS, nccl

An error keeps the frames that it passed through, and with them the tensors of the step. Until `release_tensors` drops these, the
next step finds as little memory as the failed one.
"""

import contextlib
import signal
import traceback
from pathlib import Path

import torch

from transom_core.errors import LossCause, StepFailed, WorkerLost

_TEXTS = (
    "not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory",
    "cublas_status_alloc_failed",
)  # fmt: skip
# Signals that other processes or the kernel's OOM killer send; a process that crashes ends by other signals, such as SIGSEGV.
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
    """Return why a child process ended, given that its parent did not end it. `code` is negative for a signal, as in `subprocess`.

    `num_out_of_memory` is the result of `count_out_of_memory()` before the child began. The kernel's OOM killer sends SIGKILL and
    raises that count, so the two together tell it from another process that sends SIGKILL.
    """
    if code >= 0 or -code not in _OUTSIDE:
        return "crash"
    was_oom_killed = -code == signal.SIGKILL and count_out_of_memory() > num_out_of_memory
    return "out_of_memory" if was_oom_killed else "killed"


def count_out_of_memory() -> int:
    """Return how many processes the kernel's OOM killer has ended, in this control group or else on this host."""
    for path in (_CGROUP_EVENTS, _HOST_EVENTS):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or an error that caused it, says that memory is short."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen).lower() for text in _TEXTS):
            return True
        seen = seen.__cause__
    return False


def release_tensors(error: BaseException) -> str:
    """Clear the local variables of the frames that an error passed through; return the error's text in one line.

    Frames that still run keep their variables.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def free_cached_memory(device: torch.device) -> None:
    """Give the device back the memory that torch's allocator has cached, so that it can be allocated in other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
