"""The order of requests by their priorities, for the queues of routers and of workers alike.

*Virtual arrival*: with the scheduling policy `priority` each step of a request's priority number counts as an arrival
`PRIORITY_AGING_S` seconds later, and the request with the earliest virtual arrival runs first. A request of priority 2 that arrives
at second 100 is served like a request of priority 0 that arrives at second 160. So waiting improves a request's place against all
that come after it, and no request starves. Where clients may ask for priorities from -M to M, a request of priority p is overtaken
only by requests that arrive less than `(p + M) * PRIORITY_AGING_S` seconds after it. With the policy `fcfs` priorities count for
nothing.
"""

from __future__ import annotations

from transom_core.config import SchedulingPolicy

PRIORITY_AGING_S = 30.0


def virtual_arrival_s(arrival_s: float, priority: int, policy: SchedulingPolicy) -> float:
    """Return the time at which a request counts as having arrived, on the clock of `arrival_s`."""
    return arrival_s + priority * PRIORITY_AGING_S if policy == "priority" else arrival_s
