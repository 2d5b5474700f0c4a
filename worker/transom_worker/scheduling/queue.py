"""Sequences in order of their virtual arrival: who is served first, who is preempted first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from transom_worker.config import SchedulerConfig
from transom_worker.contract import Request
from transom_worker.scheduling.sequence import OrderKey, Sequence

# With `priority`, a request counts as having arrived so many seconds later for each step of its priority number. So it is
# overtaken only by those that arrive within that time after it, and waits no longer than they do: nobody starves.
PRIORITY_AGING_S = 30.0


def virtual_arrival_s(request: Request, config: SchedulerConfig) -> float:
    """When a request counts as having arrived."""
    if config.policy == "priority":
        return request.arrival_s + request.priority * PRIORITY_AGING_S
    # who comes from a lost worker in mid-stream stands before all who have not begun
    return -1.0 if request.resumed_output_ids else 0.0


class OrderedQueue:
    """A list kept in key order. A preempted sequence keeps its key, and so stands before all that arrived later."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """The one to serve next."""
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The one to preempt next."""
        return self._sequences[-1]

    def num_before(self, sequence: Sequence) -> int:
        """How many stand before one, be it in here or not."""
        return bisect_left(self._sequences, sequence.key, key=_key)

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Take out one that is in here."""
        at = bisect_left(self._sequences, sequence.key, key=_key)
        assert self._sequences[at] is sequence
        del self._sequences[at]


def _key(sequence: Sequence) -> OrderKey:
    return sequence.key
