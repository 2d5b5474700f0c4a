"""Recognises the errors of a step that ran out of memory, and frees the tensors that such a step leaves behind.

Torch and numpy report missing memory by several classes and texts:

    torch.OutOfMemoryError                 the allocator of CUDA devices
    MemoryError                            numpy and Python
    RuntimeError, by its text              torch's allocator on CPUs, CUDA's driver, cuBLAS, nccl

An error keeps the frames that it passed through, and with them the tensors of the step. As long as these exist, the next step finds
as little memory as the failed one.
"""

from __future__ import annotations

import traceback

import torch

_TEXTS = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
)


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
    """Return memory that torch's allocator has cached to the device, so that it can be allocated in other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
