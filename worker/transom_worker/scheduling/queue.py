"""`OrderedQueue`: sequences in the order in which the scheduler serves them; it preempts them in the reverse order.

If several clients have requests, they take turns (`clients`); the following holds for the sequences of each client.

The order key of a sequence is its *virtual arrival* (`contract.request`), then a counter. With the policy `fcfs` the counter
alone decides, except that streams that migrated from a lost worker come first. With `priority` the virtual arrival is, on this
worker's clock: the arrival here, minus the time that the request waited in its router before, plus 30 seconds for each step of its
priority number (a lower number is served first).

A key never changes, so admission and preemption have the same order, and a request moves up in it as those before it end. This
bounds the wait: let a request of priority p arrive at its router at second t, and let clients use priorities from -M to M. Only
requests that arrive at their routers before t + 30 (p + M) can be admitted before it, or preempt it. From that second on the set of
requests before it only shrinks, and the first request in order always makes progress (`admission`). So the request runs to its end,
however many requests arrive later.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from transom_core.config import SchedulerConfig
from transom_core.contract import Request
from transom_core.contract.request import virtual_arrival_s
from transom_worker.scheduling.sequence import OrderKey, Sequence


def order_time_s(request: Request, config: SchedulerConfig, now_s: float) -> float:
    """Return the first part of a request's order key; `now_s` is the scheduler's time, at which the request arrives here."""
    if config.policy == "priority":
        return virtual_arrival_s(now_s - request.waited_s, request.priority, config.policy)
    # A stream that migrated from a lost worker stands before all requests that have no output yet.
    return -1.0 if request.resumed_output_ids else 0.0


class OrderedQueue:
    """A list of sequences in order of their keys. A preempted sequence keeps its key, so it stands before all later arrivals."""

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
