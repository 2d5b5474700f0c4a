"""The router's spans: one for each HTTP request with a prompt, and below it one for each attempt at a worker.

Names and attributes follow OpenTelemetry's conventions for HTTP servers and generative AI. What a worker does stands below its
attempt, so that a request whose worker died shows who had it, although that worker's own spans died with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from transom_cluster import __version__
from transom_cluster.routing.placer import PlacementDecision
from transom_worker.config import TracingConfig
from transom_worker.logs import trace_id_of
from transom_worker.telemetry.tracing import Tracing, nanoseconds

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
FIRST_ERROR_STATUS = 500  # what is the client's fault is no failure of the server's span


class RouterTracing:
    """One router's spans. Runs on its event loop; what is ended waits for a thread that sends it."""

    def __init__(self, config: TracingConfig, router_id: str, *, model: str) -> None:
        self.tracing = Tracing(config, role="router", name=router_id, version=__version__)
        self._model = model

    def begin(self, path: str, headers: Mapping[str, str], at_s: float) -> RequestTrace:
        """A request has come; its client may have sent a traceparent."""
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "gen_ai.operation.name": OPERATIONS.get(path, path.strip("/")),
            "gen_ai.provider.name": "transom",
            "gen_ai.request.model": self._model,
        }
        parent = self.tracing.context_of(headers)
        span = self.tracing.start(f"POST {path}", parent, kind="SERVER", at_s=at_s, attributes=attributes)
        return RequestTrace(self.tracing, span)

    def close(self) -> None:
        """Send what waits, for some seconds at most."""
        self.tracing.close()


class RequestTrace:
    """One request's span, and those of its attempts."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span
        self._below = tracing.context_below(span)
        self._attempts: dict[int, Any] = {}  # by choice
        self.trace_id = trace_id_of(tracing.parent_header(span))

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """More about the request."""
        self._span.set_attributes(attributes)

    def attempt_began(self, index: int, placed: PlacementDecision, *, policy: str, num_resumed: int) -> str:
        """A choice goes to a worker; returns the traceparent for it."""
        self.attempt_ended(index, "")
        attributes = {
            "transom.worker": placed.worker_id,
            "transom.choice": index,
            "transom.routing_policy": policy,
            "transom.placement_reason": placed.reason,
            "transom.predicted_hit_tokens": placed.predicted_tokens,
            "transom.resumed_tokens": num_resumed,
        }
        span = self._tracing.start("worker", self._below, kind="CLIENT", at_s=time.time(), attributes=attributes)
        self._attempts[index] = span
        return self._tracing.parent_header(span)

    def attempt_ended(self, index: int, error: str) -> None:
        """A choice is no longer at its worker; `error`: the reason, where that is not its end."""
        span = self._attempts.pop(index, None)
        if span is not None:
            if error:
                self._tracing.fail(span, error)
            span.end()

    def request_ended(self) -> None:
        """What still runs is given up."""
        for index in list(self._attempts):
            self._attempts[index].set_attribute("transom.abandoned", True)
            self.attempt_ended(index, "")

    def end(self, status: int, error: str, at_s: float) -> None:
        """The last byte is out; `error`: the class of what a stream that had begun ended with."""
        self._span.set_attribute("http.response.status_code", status)
        if error or status >= FIRST_ERROR_STATUS:
            self._tracing.fail(self._span, error or str(status))
        self._span.end(nanoseconds(at_s))
