"""What captures a forward pass and replays it: CUDA graphs, behind a protocol that a test can stand in for.

Capturing runs the host's side of the pass once and keeps what it would have launched, addresses and numbers included. A replay
launches just that: a number that the host worked out for one step stays as it was.
"""

from __future__ import annotations

import contextlib
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
    """CUDA graphs in one memory pool, captured on one stream: they are replayed one at a time.

    Graphs live and die together: from torch 2.12 on destroying one frees cuBLAS's workspace of the stream, which all of them use.
    """

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
        try:
            with torch.cuda.stream(self._stream):
                run()
        finally:  # behind an error too: what was launched before it still runs
            now.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture cannot free what is cached to make room
        graph = torch.cuda.CUDAGraph()
        # not torch.cuda.graph: where a capture fails its end fails too, which hides why, and leaves this thread on the stream
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Neither stream nor allocator is left capturing.

        With torch 2.11 the allocator would be, if ending fails: it then never frees again what it has cached, and memory runs out.
        The pool stays allocated: to release it once too often, where torch does so itself, would end the process.
        """
        with contextlib.suppress(Exception):
            graph.capture_end()
        with contextlib.suppress(Exception):  # private, and an error where nothing is left to end
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)


def capture_device(device: torch.device) -> CaptureDevice | None:
    """What captures on this device, if anything does."""
    return CudaCapture(device) if device.type == "cuda" else None
