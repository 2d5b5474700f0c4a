"""`VirtualClock` and `StepCost`: a simulation's clock, which advances by the time that each step would take on a real GPU.
`Arrivals` decides by it when a workload's requests arrive.

So the requests of a recorded trace overlap about as much as they did when they were recorded. Example with the default costs: a
step of 2,000 tokens takes 0.008 + 2,000 * 0.00002 = 0.048 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from transom_worker.scheduling.step import StepPlan
from transom_worker.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The duration of a step: a fixed part, and a part per computed token. The defaults suit a 20B model on one large GPU.

    Loads from the host tier run at `load_bytes_per_s` while the step computes; the longer of the two counts.
    """

    step_s: float = 0.008
    token_s: float = 0.00002
    load_bytes_per_s: float = 16 * 2**30

    def of(self, plan: StepPlan, block_bytes: Sequence[int] = ()) -> float:
        """Return the seconds that a plan takes; `block_bytes` has, by group, the bytes of a block that is loaded."""
        loads = zip(plan.copy_group, plan.copy_ticket, strict=False)
        load_bytes = sum(block_bytes[group] for group, ticket in loads if ticket > 0)
        return max(self.step_s + self.token_s * plan.num_tokens, load_bytes / self.load_bytes_per_s)


class VirtualClock:
    """Seconds since the workload's beginning. It is callable, so that it can serve as the cache's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock by this many seconds."""
        self.now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        """Advance the clock to a moment, if it is in the future."""
        self.now_s = max(self.now_s, moment_s)


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
