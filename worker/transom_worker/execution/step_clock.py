"""What a step's seconds went into.

A device works behind the host: launching a forward pass takes the host less time than computing it takes the device, and the host
then waits where it reads the sampled ids. There events on the device say what copies and the forward pass took. They are read when
the sampled ids have been, so that nothing waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import torch

from transom_worker.scheduling.step import StepTimings


class Mark(IntEnum):
    """Moments of a step, in order."""

    BEGIN = 0
    APPLIED = 1  # the plan's changes
    COPIED = 2  # its blocks
    PREPARED = 3  # the forward pass's inputs
    FORWARDED = 4
    SAMPLED = 5


_ON_DEVICE = (Mark.APPLIED, Mark.COPIED, Mark.PREPARED, Mark.FORWARDED)


class DeviceEvent(Protocol):
    """A moment in what a device does."""

    def record(self) -> None:
        """It is when what was launched until now is done."""
        ...

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to `end_event`; both have come."""
        ...


class StepClock:
    """Times one step after the other; without events by the host's clock alone."""

    def __init__(
        self,
        make_event: Callable[[], DeviceEvent] | None = None,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._events = {} if make_event is None else {mark: make_event() for mark in _ON_DEVICE}
        self._now_s = now_s
        self._times_s: dict[Mark, float] = {}

    def begin(self) -> None:
        """A step begins."""
        self._times_s = {}
        self.mark(Mark.BEGIN)

    def mark(self, mark: Mark) -> None:
        """The host has come so far."""
        self._times_s[mark] = self._now_s()
        if mark in self._events:
            self._events[mark].record()

    @property
    def busy_s(self) -> float:
        """From the step's begin to its last mark."""
        return self._times_s[max(self._times_s)] - self._times_s[Mark.BEGIN]

    def timings(self) -> StepTimings:
        """The parts of a step that has come to its last mark; they add up to `busy_s`."""
        at = self._times_s
        before_s, after_s = at[Mark.PREPARED] - at[Mark.BEGIN], at[Mark.SAMPLED] - at[Mark.PREPARED]
        copy_s = min(self._between(Mark.APPLIED, Mark.COPIED), before_s)
        forward_s = min(self._between(Mark.PREPARED, Mark.FORWARDED), after_s)
        return StepTimings(
            begin_s=at[Mark.BEGIN],
            prepare_s=before_s - copy_s,
            copy_s=copy_s,
            forward_s=forward_s,
            sample_s=after_s - forward_s,
        )

    def _between(self, first: Mark, last: Mark) -> float:
        # not where nothing was sampled, hence nothing waited for
        if last in self._events and self._events[last].query():
            return float(self._events[first].elapsed_time(self._events[last])) / 1e3
        return self._times_s[last] - self._times_s[first]


def step_clock(device: torch.device) -> StepClock:
    """The clock for steps on a device."""
    return StepClock(_cuda_event) if device.type == "cuda" else StepClock()


def _cuda_event() -> DeviceEvent:
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
