"""Decides when a workload's requests arrive: one at a time in its order, or at their recorded times.

Times are seconds of the simulation's virtual clock. A request's field `after` may name another request, such as the previous turn
of a conversation; then it does not arrive before that one has been answered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from transom_worker.simulate.workload import Workload


class SequentialArrivals:
    """Requests arrive one at a time, in the workload's order; their recorded times are ignored."""

    def __init__(self, workload: Workload) -> None:
        self._next = 0
        self._count = len(workload.requests)

    def due(self, now_s: float, *, idle: bool) -> Iterator[int]:
        """Yield the indices of requests that arrive now; `idle` says that no request is being served."""
        if idle and self._next < self._count:
            self._next += 1
            yield self._next - 1

    def next_s(self) -> float | None:
        """Return when the next request arrives; None if all have arrived."""
        return 0.0 if self._next < self._count else None

    def next_beside_others_s(self) -> float:
        """Return when the next request arrives while others are being served: never."""
        return math.inf

    def answered(self, index: int, now_s: float) -> None:
        """Note that a request has ended or was refused."""


class RecordedArrivals:
    """Requests arrive at their recorded times, but not earlier than `pause_s` after the end of the request that `after` names.

    Example: a turn is recorded at second 10, and the previous turn's answer ends at second 12. The turn arrives at second 12, or
    at second 14 if its pause is 2 seconds.
    """

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._successors: dict[int, list[int]] = defaultdict(list)
        self._ready: list[tuple[float, int]] = []  # heap
        for index, request in enumerate(workload.requests):
            if request.after is None:
                heappush(self._ready, (request.arrival_s, index))
            else:
                self._successors[request.after].append(index)

    def due(self, now_s: float, *, idle: bool) -> Iterator[int]:
        """Yield the indices of requests that arrive at `now_s` or arrived before; `idle` does not matter."""
        while self._ready and self._ready[0][0] <= now_s:
            yield heappop(self._ready)[1]

    def next_s(self) -> float | None:
        """Return when the next request arrives; None if none is left, or all that are left wait for an answer."""
        return self._ready[0][0] if self._ready else None

    def next_beside_others_s(self) -> float:
        """Return when the next request arrives while others are being served; infinity if all wait for an answer."""
        return self._ready[0][0] if self._ready else math.inf

    def answered(self, index: int, now_s: float) -> None:
        """Note that a request has ended or was refused: the requests that come after it may arrive."""
        for successor in self._successors.pop(index, ()):
            request = self._requests[successor]
            heappush(self._ready, (max(now_s + request.pause_s, request.arrival_s), successor))


Arrivals = SequentialArrivals | RecordedArrivals

ARRIVALS: dict[str, type[Arrivals]] = {
    "sequential": SequentialArrivals,
    "recorded": RecordedArrivals,
}
