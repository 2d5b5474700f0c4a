"""Who is told what becomes of requests inside the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from transom_worker.scheduling.sequence import Sequence


class SchedulerListener(Protocol):
    """Called on the engine's thread, in the middle of decisions: nothing here may wait, raise, or touch the sequence."""

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """A request was taken; so many stand before it in the queue."""

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """A request was let in, for the first time or again: its known tokens by outcome of the hit search (`hit`, `repaired`,
        `missed_<reason>`; of the prompt alone the first time). It is computed from `sequence.scheduled` on."""

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """A request goes back to the queue; its blocks are still there."""
