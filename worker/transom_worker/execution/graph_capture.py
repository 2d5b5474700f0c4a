"""What captures a forward pass and replays it: CUDA graphs, behind a protocol that a test can stand in for.

Capturing runs the host's side of the pass once and keeps what it would have launched, addresses and numbers included. A replay
launches just that: a number that the host worked out for one step stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Replayable(Protocol):
    """A captured pass."""

    def replay(self) -> None:
        """Launch it over what its inputs hold now."""
        ...


class CaptureDevice(Protocol):
    """A device that can capture."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes on the host that the device can read without the host waiting."""
        ...

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy bytes, in order with what is launched before and after; the host does not wait."""
        ...

    def wait_uploaded(self) -> None:
        """Return when the last upload has read its source, which may be written to then."""
        ...

    def capture(self, run: Callable[[], None]) -> Replayable:
        """What `run` launches: it runs once, so that kernels are compiled, and is then captured, when nothing is computed."""
        ...


class CudaCapture:
    """CUDA graphs in one memory pool, captured on one stream: they are replayed one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """See `CaptureDevice`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """See `CaptureDevice`."""
        device.copy_(host, non_blocking=True)
        self._uploaded.record(torch.cuda.current_stream(self._device))

    def wait_uploaded(self) -> None:
        """See `CaptureDevice`. Sampled ids are read at the end of nearly every step, so that this hardly ever waits."""
        self._uploaded.synchronize()

    def capture(self, run: Callable[[], None]) -> Replayable:
        """See `CaptureDevice`. What other threads of the process do on the device meanwhile is no error."""
        # on the stream of the capture, for which cuBLAS then has its workspace outside the graphs' pool
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            run()
        now.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph


def capture_device(device: torch.device) -> CaptureDevice | None:
    """What captures on this device, if anything does."""
    return CudaCapture(device) if device.type == "cuda" else None
