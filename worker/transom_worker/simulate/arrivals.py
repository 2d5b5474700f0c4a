"""Decides when a workload's requests arrive. Times are seconds of the simulation's virtual clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from transom_worker.simulate.workload import Workload


class Arrivals:
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

    def due(self, now_s: float) -> Iterator[int]:
        """Yield the indices of requests that arrive at `now_s` or arrived before."""
        while self._ready and self._ready[0][0] <= now_s:
            yield heappop(self._ready)[1]

    def next_s(self) -> float | None:
        """Return when the next request arrives; None if none is left, or all that are left wait for an answer."""
        return self._ready[0][0] if self._ready else None

    def answered(self, index: int, now_s: float) -> None:
        """Note that a request has ended or was refused: the requests that come after it may arrive."""
        for successor in self._successors.pop(index, ()):
            request = self._requests[successor]
            heappush(self._ready, (max(now_s + request.pause_s, request.arrival_s), successor))
