"""`SchedulerListener`: the interface through which metrics, timelines and the block map hear what happens to requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from transom_worker.scheduling.sequence import Sequence


class SchedulerListener(Protocol):
    """Callbacks of the scheduler, made on the engine's thread in the middle of its decisions.

    An implementation may not wait, raise, or change the sequence.
    """

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """The scheduler has queued a request; `num_ahead` waiting requests stand before it."""

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """The scheduler has admitted a request, for the first time or after a preemption.

        `tokens` counts its known tokens by outcome of the hit search (`hit`, `repaired`, `missed_<reason>`); at the first
        admission it counts the prompt's tokens alone. The request is computed from position `sequence.scheduled` on.
        """

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """The scheduler preempts a request; its KV blocks are released after this call. `mode` is how: `recompute`."""
