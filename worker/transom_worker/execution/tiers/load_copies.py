"""Loads: block copies from the host tier to the device that run beside the steps, each under a *ticket*.

    loads.start(ticket, copies) -> the copies run -> loads.poll() -> board.take() returns the ticket, once

On CPUs a thread copies. On a GPU the copies run on a CUDA stream of their own, and an event tells when they have ended. If a copy
fails, `take` raises its error, since the contents of the load's target blocks are then unknown.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from transom_core.errors import StepFailed
from transom_kernels.block_copy import block_copy_between


class RowCopies(NamedTuple):
    """Copies of one group: `target[t] = source[s]` for each pair (s, t); both are the group's blocks as rows of bytes."""

    source: torch.Tensor
    target: torch.Tensor
    pairs: Sequence[tuple[int, int]]


@dataclass(slots=True)
class EndedLoads:
    """Tickets of the loads that have ended and the seconds that each took, and tickets of the loads that failed."""

    loaded: list[int] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class LoadBoard:
    """Where threads report loads that have ended. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = EndedLoads()
        self._error: BaseException | None = None
        self._num_in_flight = 0

    @property
    def num_in_flight(self) -> int:
        """Return the number of loads that were started and that `take` has not returned yet."""
        return self._num_in_flight

    def started(self) -> None:
        """Count a load that was started."""
        with self._changed:
            self._num_in_flight += 1

    def ended(self, ticket: int, seconds: float) -> None:
        """Note that a load has ended after `seconds`."""
        with self._changed:
            self._ended.loaded.append(ticket)
            self._ended.load_s.append(seconds)
            self._changed.notify_all()

    def failed(self, ticket: int) -> None:
        """Note that a load has ended without all its contents."""
        with self._changed:
            self._ended.failed.append(ticket)
            self._changed.notify_all()

    def broke(self, error: BaseException) -> None:
        """Note an error after which the contents of blocks are unknown; `take` raises it."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until a load has ended, or none is in flight, or the time is over."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)

    def take(self) -> EndedLoads:
        """Return the loads that have ended since the last call.

        Raises:
            StepFailed: a copy raised an exception.
        """
        with self._changed:
            if self._error is not None:
                raise StepFailed(f"A load of KV blocks failed: {type(self._error).__name__}: {self._error}")
            ended, self._ended = self._ended, EndedLoads()
            self._num_in_flight -= len(ended.loaded) + len(ended.failed)
            return ended

    def _has_news(self) -> bool:
        return bool(self._ended.loaded or self._ended.failed or self._error or not self._num_in_flight)


class Loads(ABC):
    """Starts loads, and reports their ends to a board."""

    @abstractmethod
    def start(self, ticket: int, copies: list[RowCopies]) -> None:
        """Begin a load after everything that the rank has been told to do so far."""

    @abstractmethod
    def poll(self, *, wait: bool) -> None:
        """Report the loads that have ended, if no thread reports them; with `wait`, wait for the oldest one first."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the running load, and drop the loads after it; idempotent."""


class ThreadLoads(Loads):
    """Loads by a thread that the first load starts. Steps run beside it, because numpy's copies release the GIL."""

    def __init__(self, board: LoadBoard) -> None:
        self._board = board
        self._queue: SimpleQueue[tuple[int, list[RowCopies]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self, ticket: int, copies: list[RowCopies]) -> None:
        """Queue a load."""
        self._board.started()
        self._queue.put((ticket, copies))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transom-loads", daemon=True)
            self._thread.start()

    def poll(self, *, wait: bool) -> None:
        """Do nothing: the thread reports."""

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (load := self._queue.get()) is not None and not self._is_closed:
                self._copy(*load)
        # The rank must learn of any error, and no step may wait for this load forever.
        except BaseException as error:
            self._board.broke(error)

    def _copy(self, ticket: int, copies: list[RowCopies]) -> None:
        begin_s = time.perf_counter()
        for group in copies:
            source, target = group.source.numpy(), group.target.numpy()
            for from_id, to_id in group.pairs:
                target[to_id] = source[from_id]
        self._board.ended(ticket, time.perf_counter() - begin_s)


class StreamLoads(Loads):
    """Loads on a CUDA stream of their own."""

    def __init__(self, board: LoadBoard, device: torch.device) -> None:
        self._board, self._device = board, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: deque[tuple[int, Any, Any]] = deque()  # ticket, events before and after the copies

    def start(self, ticket: int, copies: list[RowCopies]) -> None:
        """Launch a load after the work that is already in the step's stream, which may still use the target blocks."""
        self._board.started()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            for group in copies:
                block_copy_between(group.source, group.target, group.pairs)
            end.record()
        self._running.append((ticket, begin, end))

    def poll(self, *, wait: bool) -> None:
        """Report the loads whose last event the device has reached; they end in order."""
        if wait and self._running:
            self._running[0][2].synchronize()
        while self._running and self._running[0][2].query():
            ticket, begin, end = self._running.popleft()
            self._board.ended(ticket, begin.elapsed_time(end) / 1e3)

    def close(self) -> None:
        """Wait for all launched loads."""
        self._stream.synchronize()
        self._running.clear()


def make_loads(board: LoadBoard, device: torch.device) -> Loads:
    """Return the loads for a rank that computes on `device`."""
    return StreamLoads(board, device) if device.type == "cuda" else ThreadLoads(board)
