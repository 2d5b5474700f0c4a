"""Brings small arrays from the host to a device: all arrays of a call travel in one copy, for which the host does not wait.

A copy from pageable memory costs the host about 10 us per array, and the driver may make the host wait for the device. So the
arrays of a call are laid out in pinned memory, which the device reads by itself while the host continues:

    pinned     token_ids | positions | block_table 0 | slots 0 | ...
                            one copy
    device     token_ids | positions | block_table 0 | slots 0 | ...      the caller gets views of this buffer
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

# Bytes. Kernels are compiled for pointers that are multiples of 16, as torch's are; a view of this buffer must meet that too.
ALIGNMENT = 64

Field = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
Fields = Mapping[str, Field]  # name of an array -> its shape and dtype
Arrays = Mapping[str, NDArray[Any]]

_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


class SharedMemory:
    """Uploads to the CPU: tensors share the memory of the host's arrays."""

    device = torch.device("cpu")

    def tensors(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Return the arrays as tensors. The arrays must not change afterwards."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Read(Protocol):
    """Tells when the device has read a buffer, as a CUDA event does."""

    def synchronize(self) -> None:
        """Wait until the device has read the buffer."""
        ...


class _PinnedBuffer:
    """A pinned buffer that grows, and the event that tells when the device has read it."""

    host: torch.Tensor | None = None
    read: Read | None = None


class PinnedUploads:
    """Uploads to a GPU. Tests replace `pinned` and `copy`."""

    def __init__(self, device: torch.device, *, per_step: int = 1) -> None:
        """`per_step` is how many calls of `tensors` a step makes. Two steps may be in flight, so there are `2 * per_step` buffers,
        used in turn: when a buffer's turn comes again, the device has usually read it, and the host need not wait."""
        self.device = device
        self._buffers = cycle([_PinnedBuffer() for _ in range(2 * per_step)])

    def tensors(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Return the arrays on the device."""
        parts, num_bytes = _layout({name: (array.shape, array.dtype) for name, array in arrays.items()})
        buffer = next(self._buffers)
        if buffer.read is not None:
            buffer.read.synchronize()
        if buffer.host is None or len(buffer.host) < num_bytes:
            # A power of two, so that a buffer grows only a few times.
            buffer.host = self.pinned(max(ALIGNMENT, 1 << (num_bytes - 1).bit_length()))
        host = buffer.host.numpy()
        typed = {dtype: host.view(dtype) for dtype in {part.dtype for part in parts}}
        for name, _, dtype, begin, end in parts:
            typed[dtype][begin:end] = arrays[name].reshape(-1)
        device_bytes, buffer.read = self.copy(buffer.host[:num_bytes])
        return _views(parts, device_bytes)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return bytes on the host that the device can read while the host continues."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Read]:
        """Start copying bytes to the device on the current stream, in order with what is launched before and after."""
        device_bytes = host.to(self.device, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(torch.cuda.current_stream(self.device))
        return device_bytes, read


Uploads = SharedMemory | PinnedUploads
"""Brings arrays to one device."""


def uploads_to(device: torch.device, *, per_step: int = 1) -> Uploads:
    """Return the `Uploads` of a device; `per_step` is how many calls of `tensors` a step makes."""
    return PinnedUploads(device, per_step=per_step) if device.type == "cuda" else SharedMemory()


def packed_views(fields: Fields, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of arrays that lie one after the other in a buffer. The buffer's size is a multiple of `ALIGNMENT` and at least
    `packed_bytes(fields)`."""
    return _views(_layout(fields)[0], buffer)


def packed_bytes(fields: Fields) -> int:
    """Return the bytes that packed arrays take."""
    return _layout(fields)[1]


class _Part(NamedTuple):
    """Where an array lies in a buffer: its begin and end, counted in elements of the array's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    end: int


def _layout(fields: Fields) -> tuple[list[_Part], int]:
    """Return where each array lies, and the bytes of all arrays. Each array begins at a multiple of `ALIGNMENT` bytes."""
    parts, num_bytes = [], 0
    for name, (shape, dtype) in fields.items():
        begin, size = num_bytes // dtype.itemsize, prod(shape)
        parts.append(_Part(name, shape, dtype, begin, begin + size))
        num_bytes += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return parts, num_bytes


def _views(parts: Sequence[_Part], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    typed = {dtype: buffer.view(_TORCH_DTYPES[dtype]) for dtype in {part.dtype for part in parts}}
    views = {}
    for name, shape, dtype, begin, end in parts:
        view = typed[dtype][begin:end]
        views[name] = view if len(shape) == 1 else view.view(shape)
    return views
