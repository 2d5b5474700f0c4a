"""Which request comes next: one at a time in the workload's order, or when the workload's clock says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from transom_worker.simulate.workload import Workload


class SequentialArrivals:
    """One at a time, in the workload's order, whatever its clock says."""

    def __init__(self, workload: Workload) -> None:
        self._next = 0
        self._count = len(workload.requests)

    def due(self, now_s: float, *, idle: bool) -> Iterator[int]:
        """Indices into the workload that come now. `idle`: none is being served."""
        if idle and self._next < self._count:
            self._next += 1
            yield self._next - 1

    def next_s(self) -> float | None:
        """When the next one comes; None if all came, or wait for an answer."""
        return 0.0 if self._next < self._count else None

    def answered(self, index: int, now_s: float) -> None:
        """A request has ended, or was refused."""


class RecordedArrivals:
    """By the workload's clock, each not before its predecessor's answer."""

    def __init__(self, workload: Workload) -> None:
        self._arrival_s = [request.arrival_s for request in workload.requests]
        self._followers: dict[int, list[int]] = defaultdict(list)
        self._ready: list[tuple[float, int]] = []  # heap
        for index, request in enumerate(workload.requests):
            if request.after is None:
                heappush(self._ready, (request.arrival_s, index))
            else:
                self._followers[request.after].append(index)

    def due(self, now_s: float, *, idle: bool) -> Iterator[int]:
        """As above; `idle` does not matter."""
        while self._ready and self._ready[0][0] <= now_s:
            yield heappop(self._ready)[1]

    def next_s(self) -> float | None:
        """As above."""
        return self._ready[0][0] if self._ready else None

    def answered(self, index: int, now_s: float) -> None:
        """Its follower may come."""
        for follower in self._followers.pop(index, ()):
            heappush(self._ready, (max(now_s, self._arrival_s[follower]), follower))


Arrivals = SequentialArrivals | RecordedArrivals

ARRIVALS: dict[str, type[Arrivals]] = {
    "sequential": SequentialArrivals,
    "recorded": RecordedArrivals,
}
