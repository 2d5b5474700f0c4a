"""Seconds of device work: medians over many repeats, each after a flush of the caches that also keeps the device busy while the
host enqueues. Work that can be captured is timed as a replayed CUDA graph, so that gaps between launches do not count.

A flush reads, so that the cache holds nothing that has yet to be written back: work that only reads would pay for that. Work that
writes much leaves a cache full of its own data behind, whose write-back would not be counted, hence the flush before it writes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]

FLUSH_BYTES = 512 << 20  # several times any L2 cache; going through it takes longer than enqueueing a launch
WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians of two halves of the repeats apart: `spread` is how far they differ, which is what counts as noise."""

    seconds: float
    spread: float  # of the larger median over the smaller, less 1
    repeats: int
    launch: str  # "graph", "eager" or "cpu"
    host_s: float  # for enqueueing it eagerly, which a serving step pays unless it is captured


class Timer:
    """Times work on one device."""

    def __init__(self, device: torch.device, *, seconds: float = 0.25) -> None:
        """About `seconds` are spent on each piece of work, in 10 to 200 repeats."""
        self._seconds = seconds
        self._is_cuda = device.type == "cuda"
        self._flushed = torch.zeros(FLUSH_BYTES // 4 if self._is_cuda else 1, device=device)
        self._sum = torch.empty((), device=device)
        self.is_spoilt = False  # a capture broke off, which torch does not undo: this process should time nothing more

    def time(self, work: Work, *, captured: bool = True, writes: bool = False) -> Timing:
        """Measure after warming up (compilation is not timed); `writes` where much of what it moves is written."""
        for _ in range(WARM_UPS if self._is_cuda else 1):
            work()
        if not self._is_cuda:
            return self._on_the_cpu(work)
        torch.cuda.synchronize()
        host_s = self._host_s(work)
        graph = self._capture(work) if captured else None
        timed: Work = work if graph is None else graph.replay
        once_s = statistics.median(self._device_s(timed, 3, writes))
        repeats = int(min(200, max(10, self._seconds / max(once_s, 1e-6))))
        halves = [statistics.median(self._device_s(timed, repeats, writes)) for _ in range(2)]
        return Timing(
            seconds=statistics.median(halves),
            spread=max(halves) / max(min(halves), 1e-12) - 1,
            repeats=2 * repeats,
            launch="eager" if graph is None else "graph",
            host_s=host_s,
        )

    def _flush(self, writes: bool) -> None:
        if writes:
            self._flushed.zero_()
        else:
            torch.sum(self._flushed, dim=0, out=self._sum)

    def _device_s(self, work: Work, repeats: int, writes: bool) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in marks:
            self._flush(writes)
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]

    def _host_s(self, work: Work) -> float:
        self._flush(False)
        begin_s = time.perf_counter()
        work()
        spent_s = time.perf_counter() - begin_s
        torch.cuda.synchronize()
        return spent_s

    def _on_the_cpu(self, work: Work) -> Timing:
        """For smoke runs: says that it ran, nothing about speed."""
        begin_s = time.perf_counter()
        work()
        spent_s = time.perf_counter() - begin_s
        return Timing(seconds=spent_s, spread=0.0, repeats=1, launch="cpu", host_s=spent_s)

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph | None:
        """The work as a graph; None where it cannot be captured. Not even tried where it waits for the device."""
        if _waits_for_the_device(work):
            return None
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                work()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                work()
        except RuntimeError:
            if torch.cuda.current_stream() == stream:  # the capture could not even be ended
                self.is_spoilt = True
                torch.cuda.set_stream(torch.cuda.default_stream())
            torch.cuda.synchronize()
            return None
        return graph


def _waits_for_the_device(work: Work) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return False
