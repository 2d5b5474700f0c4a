"""`OrderedQueue`: sequences in the order in which the scheduler serves them; it preempts them in the reverse order.

The order key of a sequence is its *virtual arrival*, then a counter. With the policy `fcfs` all requests have the same virtual
arrival, so the counter decides. With `priority` each step of a request's priority number counts as an arrival 30 seconds later:
a request of priority 2 that arrives at second 100 is served like a request of priority 0 that arrives at second 160.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from transom_worker.config import SchedulerConfig
from transom_worker.contract import Request
from transom_worker.scheduling.sequence import OrderKey, Sequence

# Seconds per step of a priority number. A request is overtaken only by requests that arrive within `priority * 30`
# seconds after it.
PRIORITY_AGING_S = 30.0


def virtual_arrival_s(request: Request, config: SchedulerConfig) -> float:
    """Return the time at which a request counts as having arrived: the first part of its order key."""
    if config.policy == "priority":
        return request.arrival_s + request.priority * PRIORITY_AGING_S
    # A stream that migrated from a lost worker stands before all requests that have no output yet.
    return -1.0 if request.resumed_output_ids else 0.0


class OrderedQueue:
    """A list of sequences in order of their keys. A preempted sequence keeps its key, so it stands before all that arrived
    later.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """The sequence to serve next. The queue must not be empty."""
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The sequence to preempt next. The queue must not be empty."""
        return self._sequences[-1]

    def num_before(self, sequence: Sequence) -> int:
        """Return how many sequences of the queue come before this one in order; this one need not be in the queue."""
        return bisect_left(self._sequences, sequence.order_key, key=_key)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence, in order."""
        insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        at = bisect_left(self._sequences, sequence.order_key, key=_key)
        assert self._sequences[at] is sequence
        del self._sequences[at]


def _key(sequence: Sequence) -> OrderKey:
    return sequence.order_key
