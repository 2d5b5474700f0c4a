"""Measures the seconds that a step spends on preparing inputs, block copies, the forward pass, and sampling.

A GPU lags the host: the host launches a step in less time than the GPU computes it, and may launch the next one before it reads
the sampled ids of this one. So on a GPU, events on the device measure the copies, the forward pass and sampling. The clock reads
these events after the host has read the sampled ids, so that reading them never waits.
"""

import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from transom_worker.scheduling.step import StepTimings


class Mark(IntEnum):
    """Moments of a step at which the clock notes the time, in order."""

    BEGIN = 0
    APPLIED = 1  # sequences and block tables are updated
    COPIED = 2  # block copies are launched
    PREPARED = 3  # the inputs of the forward pass are on their way to the device
    FORWARDED = 4  # the forward pass is launched
    SAMPLED = 5  # sampling is launched


_ON_DEVICE = (Mark.APPLIED, Mark.COPIED, Mark.PREPARED, Mark.FORWARDED, Mark.SAMPLED)


class StepClock:
    """Measures one step after another. `make_event` makes objects like `torch.cuda.Event`; without it, the host's clock measures
    everything."""

    def __init__(
        self, make_event: Callable[[], Any] | None = None, *, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._events = {} if make_event is None else {mark: make_event() for mark in _ON_DEVICE}
        self._now_s = now_s
        self._times_s: dict[Mark, float] = {}

    def begin(self) -> None:
        """Note that a step begins, and drop the times of the previous step."""
        self._times_s = {}
        self.mark(Mark.BEGIN)

    def mark(self, mark: Mark) -> None:
        """Note that the host has reached this moment of the step."""
        self._times_s[mark] = self._now_s()
        if mark in self._events:
            self._events[mark].record()

    @property
    def begin_s(self) -> float:
        """Return the time at which the step began, in seconds of the host's clock."""
        return self._times_s[Mark.BEGIN]

    @property
    def copy_s(self) -> float:
        """Return the seconds of the block copies of a step that has reached that mark."""
        return self._between(Mark.APPLIED, Mark.COPIED)

    def timings(self) -> StepTimings:
        """Return the seconds of each part of a step that has reached its last mark, and whose ids the host has read.

        A device makes the copies before the forward pass, while the host prepares. So `prepare_s` is the host's time before the
        forward pass without the copies. The minima keep each part within its whole, because the two clocks may disagree.
        """
        at = self._times_s
        before_s, after_s = at[Mark.PREPARED] - at[Mark.BEGIN], self._between(Mark.PREPARED, Mark.SAMPLED)
        copy_s = min(self.copy_s, before_s)
        forward_s = min(self._between(Mark.PREPARED, Mark.FORWARDED), after_s)
        return StepTimings(
            begin_s=at[Mark.BEGIN],
            prepare_s=before_s - copy_s,
            copy_s=copy_s,
            forward_s=forward_s,
            sample_s=after_s - forward_s,
        )

    def _between(self, first: Mark, last: Mark) -> float:
        # The host does not wait for a step that samples nothing, so the device may not have reached its events yet.
        if last in self._events and self._events[last].query():
            return float(self._events[first].elapsed_time(self._events[last])) / 1e3
        return self._times_s[last] - self._times_s[first]


def step_clock(device: torch.device) -> StepClock:
    """Return the clock for steps on a device: with CUDA events on a GPU, without events elsewhere."""
    return StepClock(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else StepClock()
