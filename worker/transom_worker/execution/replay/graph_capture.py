"""Captures a forward pass and replays it as a CUDA graph. Tests replace `CudaCapture` by a class that needs no GPU.

Capturing runs the host's code of the pass once, and records the kernels that it would launch, with their addresses and numbers.
A replay launches exactly these kernels: a number that the host computed during the capture keeps its value in every replay.
"""

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch


class Replayable(Protocol):
    """A captured forward pass."""

    def replay(self) -> None:
        """Launch the captured kernels over the current content of the input buffers."""


class CudaCapture:
    """Captures CUDA graphs into one memory pool and on one stream, since they are replayed one at a time.

    All graphs must be freed together: from torch 2.12 on, freeing one also frees cuBLAS's workspace of the stream, which all of
    them use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed, pinned bytes on the host, which the device can read while the host goes on."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Copy bytes to the device, in order with what is launched before and after; the host does not wait."""
        device.copy_(host, non_blocking=True)
        self._uploaded.record(torch.cuda.current_stream(self._device))

    def wait_uploaded(self) -> None:
        """Wait until the last upload has read its source, so that the host may overwrite it. It hardly ever waits, because nearly
        every step ends with reading the sampled ids."""
        self._uploaded.synchronize()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call `run`, which compiles its kernels, and wait until the device has computed it."""
        # It uses the capture's stream too, so that cuBLAS allocates its workspace for that stream outside the graphs' pool.
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        try:
            with torch.cuda.stream(self._stream):
                run()
        finally:  # even after an error, because kernels that were launched before it still run
            now.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def capture(self, run: Callable[[], None]) -> Replayable:
        """Capture what `run` launches, without computing it. `warm_up` has called an equal `run` before.

        Work of other threads of this process on the device does not disturb the capture.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture that needs memory cannot free cached memory
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` is not used: if a capture fails, ending it fails as well, which hides the first error and leaves this
        # thread on the capture's stream.
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
        """End a failed capture, so that neither the stream nor the allocator stays in capture mode.

        With torch 2.11, the allocator stays in capture mode if ending the capture fails: it then never frees cached memory again,
        until memory runs out. The pool is not released here: if torch has released it already, a second release would end the
        process.
        """
        with contextlib.suppress(Exception):
            graph.capture_end()
        with contextlib.suppress(Exception):  # a private function, which raises if the allocator is not capturing
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)


def capture_device(device: torch.device) -> CudaCapture | None:
    """Return what captures graphs on `device`; None if the device cannot capture graphs."""
    return CudaCapture(device) if device.type == "cuda" else None
