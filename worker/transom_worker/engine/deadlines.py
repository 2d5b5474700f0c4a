"""`Deadlines`: the times by which the requests of an engine must have ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from transom_worker.engine.running_request import RunningRequest

LEAST_REMOVED = 64  # fewer deadlines of ended requests are not worth the time that removing them takes


class Deadlines:
    """The deadlines of `requests`, which the engine adds and removes, on the engine's clock."""

    def __init__(self, requests: Mapping[str, RunningRequest]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, str]] = []  # (time, request id), those of some ended requests included

    @property
    def next_s(self) -> float:
        """A time before which no deadline passes; infinite if there are none."""
        return self._heap[0][0] if self._heap else math.inf

    def watch(self, running: RunningRequest, deadline_s: float) -> None:
        """Note the deadline of a request. If more than half of the deadlines are of ended requests, those are removed."""
        running.deadline_s = deadline_s
        heapq.heappush(self._heap, (deadline_s, running.request.request_id))
        if len(self._heap) > 2 * len(self._requests) + LEAST_REMOVED:
            known = self._requests.items()
            self._heap = [(one.deadline_s, name) for name, one in known if one.deadline_s is not None]
            heapq.heapify(self._heap)

    def take_passed(self, now_s: float) -> list[str]:
        """Return the ids of the requests whose deadlines have passed, and forget these."""
        passed = []
        while self.next_s <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            running = self._requests.get(request_id)
            if running is not None and running.deadline_s == deadline_s:  # else its id was used again
                passed.append(request_id)
        return passed
