"""Small arrays on their way from the host to a device: all arrays of a call travel in one copy, for which the host does not wait.

A copy from ordinary memory costs the host some 10 us an array, and the driver may let the host wait for the device. So the arrays
of a call are laid out in pinned memory, which the device reads by itself while the host goes on:

    pinned     token_ids | positions | block_table 0 | slots 0 | ...
                            one copy
    device     token_ids | positions | block_table 0 | slots 0 | ...      of which the caller gets views
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 64  # of each array, because kernels are compiled for pointers that are multiples of 16, as torch's own are

Field = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
Fields = Mapping[str, Field]  # name of an array -> its shape and dtype
Arrays = Mapping[str, NDArray[Any]]

_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


class Uploads(Protocol):
    """Brings arrays to one device."""

    device: torch.device

    def tensors(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Return the arrays on the device. They must not change afterwards, since the tensors may share their memory."""
        ...


class SharedMemory:
    """A CPU reads what the host has written."""

    device = torch.device("cpu")

    def tensors(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """See `Uploads.tensors`."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Read(Protocol):
    """Tells when the device has read a buffer, as a CUDA event does."""

    def synchronize(self) -> None:
        """Wait until then."""
        ...


class _Place:
    """A pinned buffer that grows, and what tells when the device has read it."""

    host: torch.Tensor | None = None
    read: Read | None = None


class PinnedUploads:
    """Uploads to a GPU. Tests replace `pinned` and `copy`."""

    def __init__(self, device: torch.device, *, per_step: int = 1) -> None:
        """`per_step` is how many calls a step makes. Two steps may be in flight, so there are twice as many buffers, used in turns:
        when the host comes back to one, the device has read it, and the host need not wait.
        """
        self.device = device
        self._places = cycle([_Place() for _ in range(2 * per_step)])

    def tensors(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """See `Uploads.tensors`."""
        fields = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        num_bytes, place = packed_bytes(fields), next(self._places)
        if place.read is not None:
            place.read.synchronize()
        if place.host is None or len(place.host) < num_bytes:
            place.host = self.pinned(1 << (num_bytes - 1).bit_length())
        host = place.host.numpy()
        for name, (begin, end) in _places_of(fields):
            array = arrays[name]
            host[begin:end].view(array.dtype).reshape(array.shape)[...] = array
        device_bytes, place.read = self.copy(place.host[:num_bytes])
        return packed_views(fields, device_bytes)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return bytes on the host which the device can read while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, host: torch.Tensor) -> tuple[torch.Tensor, Read]:
        """Begin to copy bytes to the device, in order with what is launched before and after."""
        device_bytes = host.to(self.device, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(torch.cuda.current_stream(self.device))
        return device_bytes, read


def uploads_to(device: torch.device, *, per_step: int = 1) -> Uploads:
    """Return what brings arrays to a device; see `PinnedUploads` for `per_step`."""
    return PinnedUploads(device, per_step=per_step) if device.type == "cuda" else SharedMemory()


def packed_views(fields: Fields, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arrays of a buffer of `packed_bytes(fields)` bytes or more, a multiple of `ALIGNMENT`, one after the other."""
    typed = {dtype: buffer.view(dtype) for dtype in {_TORCH_DTYPES[dtype] for _, dtype in fields.values()}}
    views = {}
    for name, (begin, _) in _places_of(fields):
        shape, dtype = fields[name]
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        whole = typed[_TORCH_DTYPES[dtype]]
        views[name] = whole.as_strided(shape, strides, whole.storage_offset() + begin // dtype.itemsize)
    return views


def packed_bytes(fields: Fields) -> int:
    """Return the bytes of packed arrays."""
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in fields.values())


def _places_of(fields: Fields) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of each array, and where its bytes begin and end."""
    begin = 0
    for name, (shape, dtype) in fields.items():
        end = begin + prod(shape) * dtype.itemsize
        yield name, (begin, end)
        begin = _aligned(end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
