"""`RequestTimes`: when things happened to one request at this worker, and the labels of its exemplars.

An exemplar is a label set that OpenMetrics attaches to a histogram's bucket: here it leads from a slow bucket to the id and to
the trace of one request that fell into it.
"""

from __future__ import annotations

import re

# OpenMetrics allows 128 characters in an exemplar's label names and values together; names and a trace id take 50 of them.
MAX_ID_CHARS = 78
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class RequestTimes:
    """Identifies a request in the engine's events. Times are seconds since the epoch, 0 before the thing happens."""

    __slots__ = ("arrival_s", "exemplar", "first_token_s", "last_token_s", "request_id", "scheduled_s")

    def __init__(self, arrival_s: float, *, request_id: str = "", trace_parent: str | None = None) -> None:
        """`trace_parent` is a W3C traceparent header; the exemplar has the trace id in it."""
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.scheduled_s = 0.0  # the first plan that computes the request was sent
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.exemplar = _exemplar(request_id, trace_parent)


def _exemplar(request_id: str, trace_parent: str | None) -> dict[str, str]:
    labels = {"request_id": _UNSAFE.sub("_", request_id[:MAX_ID_CHARS])} if request_id else {}
    if trace_parent and (match := _TRACE_PARENT.match(trace_parent)):
        labels["trace_id"] = match[1]
    return labels
