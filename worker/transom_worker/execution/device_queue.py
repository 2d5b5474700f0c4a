"""Brings sampled token ids from the device to the host, and from one step to the next without the host.

A GPU runs what the host has launched while the host goes on. If the host waited for a step's tokens before it launched the next
step, the device would be idle while the host schedules, prepares and launches. So two plans are in flight:

    host      launch n+1       wait for n's ids, handle them, schedule n+2      launch n+2       wait for n+1's ids ...
    device    computes n                                            computes n+1                                    ...

Step n+1 needs the ids of step n as input before the host has them. They stay on the device: in the host's arrays the input token of
such a row is `in_row(s)`, a negative number that stands for row s of step n's ids, and `with_sampled` replaces it by the id on the
device.

Legend: S rows that are sampled, T tokens of a step.
"""

from itertools import cycle
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Fetch(Protocol):
    """Ids on their way to the host."""

    def __call__(self) -> list[int]:
        """Wait until the device has computed the ids, and return them."""
        ...

    def is_ready(self) -> bool:
        """Return whether the call would return at once."""
        ...


class DeviceQueue(Protocol):
    """The work that a device has been given, in order."""

    runs_ahead: bool
    """Whether the host goes on while the device computes, so that it may launch a step before the last one has ended."""

    def fetch(self, ids_S: torch.Tensor) -> Fetch:
        """Begin to copy ids to the host, without waiting. At most two fetches are open at once."""
        ...


class HostFetch:
    """Ids that a CPU has computed."""

    def __init__(self, ids_S: torch.Tensor) -> None:
        self._ids: list[int] = ids_S.tolist()

    def __call__(self) -> list[int]:
        """See `Fetch`."""
        return self._ids

    def is_ready(self) -> bool:
        """See `Fetch`."""
        return True


class HostQueue:
    """CPU operators, which are done when they return."""

    runs_ahead = False

    def fetch(self, ids_S: torch.Tensor) -> Fetch:
        """See `DeviceQueue.fetch`."""
        return HostFetch(ids_S)


class CudaFetch:
    """Ids that are being copied to pinned memory; the event `arrived` follows the copy."""

    def __init__(self, host_S: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self._host_S, self._arrived = host_S, arrived

    def __call__(self) -> list[int]:
        """See `Fetch`."""
        self._arrived.synchronize()
        ids: list[int] = self._host_S.tolist()
        return ids

    def is_ready(self) -> bool:
        """See `Fetch`."""
        return bool(self._arrived.query())  # type: ignore[no-untyped-call]


class CudaQueue:
    """The current stream of a GPU."""

    runs_ahead = True

    def __init__(self, *, max_rows: int) -> None:
        """`max_rows` is the largest number of rows of a step."""
        # Two pinned buffers with their events, used in turn, because two fetches may be open.
        self._buffers = cycle(
            (torch.empty(max_rows, dtype=torch.int64, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def fetch(self, ids_S: torch.Tensor) -> Fetch:
        """See `DeviceQueue.fetch`."""
        host, arrived = next(self._buffers)
        host_S = host[: len(ids_S)]
        host_S.copy_(ids_S, non_blocking=True)
        arrived.record()
        return CudaFetch(host_S, arrived)


def device_queue(device: torch.device, *, max_rows: int) -> DeviceQueue:
    """Return the queue of a device."""
    return CudaQueue(max_rows=max_rows) if device.type == "cuda" else HostQueue()


def in_row(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the input tokens that stand for the ids in these rows of the last step's ids."""
    return ~rows  # -1 for row 0: never a token id


def with_sampled(token_ids_T: torch.Tensor, sampled_S: torch.Tensor, host_T: NDArray[np.int64]) -> torch.Tensor:
    """Return the tokens, with those of `in_row` replaced by the last step's ids; the host does not wait. If `host_T`, the tokens on
    the host, stand for all these ids in order, as in most decode steps, nothing is computed."""
    if np.array_equal(host_T, in_row(np.arange(len(sampled_S)))):
        return sampled_S
    return torch.where(token_ids_T < 0, sampled_S[(~token_ids_T).clamp_(min=0)], token_ids_T)
