"""Notices when a collective on a GPU does not end.

`work.wait()` of an nccl collective does not block the host: it orders the device's later work after the collective. If another rank
hangs, the device waits for ever, and so does the host when it next reads a result. nccl's own watchdog would end the process
without a report. So a thread checks the collectives in order, and calls `on_late` when the oldest of them has run longer than the
timeout.

Sums over peer memory, and the collectives in a CUDA graph, have no such `work`: a mark at the end of each step stands for them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

LOOKS = 20  # checks within a timeout, so that the watch notices a late collective at most 1/20 of the timeout too late


class DeviceMark:
    """A point in the current stream, which is completed when the device has computed everything before it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        """Return whether the device has reached this point."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CollectiveWatch:
    """The collectives of one process group that may not have ended yet."""

    def __init__(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        """`on_late` is called once, on the watch's own thread."""
        self._timeout_s, self._on_late = timeout_s, on_late
        self._lock = threading.Lock()
        self._works: deque[tuple[Any, float]] = deque()  # (collective, time at which it was started), oldest first
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="transom-collectives", daemon=True).start()

    def add(self, work: Any) -> None:
        """Watch one more collective or `DeviceMark`. Those that have ended are dropped, because they keep their tensors alive."""
        with self._lock:
            self._drop_ended()
            self._works.append((work, time.monotonic()))

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._timeout_s / LOOKS):
            with self._lock:
                self._drop_ended()
                is_late = bool(self._works) and time.monotonic() - self._works[0][1] > self._timeout_s
            if is_late:
                self._on_late()
                return

    def _drop_ended(self) -> None:
        while self._works and self._works[0][0].is_completed():
            self._works.popleft()
