"""The outermost layer: what a request's logs, spans and its answer's headers have in common is its id, known from here on."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.http.routed_path import routed_path
from transom_cluster.openai.document import BODIES
from transom_cluster.telemetry.request_outcome import CLIENT_LEFT
from transom_cluster.telemetry.request_timeline import RequestTimeline
from transom_cluster.telemetry.span_attributes import response_attributes
from transom_cluster.telemetry.tracing import RouterTracing
from transom_worker.logs import about_request, following_requests

logger = logging.getLogger("transom.access")

FIRST_ERROR = 400
ID_HEADER = "x-request-id"
MAX_ID_CHARS = 128


class RequestIdMiddleware:
    """Begins and ends each request's span, tells its id in a header, and writes a line for it if `logs_access`.

    A request that has an id already keeps it, beside the answer's own: Ray Serve gives one to every request, its client's where it
    sent one, and answers with it. Looking at things (GET) gets neither a span, nor a line if it went well.
    """

    def __init__(self, app: ASGIApp, tracing: RouterTracing | None, logs_access: bool) -> None:
        self._app = app
        self._tracing = tracing
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, start_s, status = scope.setdefault("state", {}), time.perf_counter(), CLIENT_LEFT
        headers = Headers(scope=scope)
        state["outer_id"] = headers.get(ID_HEADER, "")[:MAX_ID_CHARS]
        trace = None
        if self._tracing is not None and scope["method"] == "POST" and (path := routed_path(scope)) in BODIES:
            trace = state["trace"] = self._tracing.begin(path, headers, time.time())

        async def followed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if "answer_id" in state and ID_HEADER not in headers:
                    MutableHeaders(scope=message)[ID_HEADER] = state["answer_id"]
            await send(message)

        with following_requests():
            if trace is not None:
                about_request("", trace.trace_id)
            try:
                await self._app(scope, receive, followed_send)
            finally:
                timeline: RequestTimeline | None = state.get("timeline")
                if trace is not None:
                    trace.describe(response_attributes(timeline))
                    trace.end(status, timeline.error if timeline is not None else "", time.time())
                if self._logs_access and (scope["method"] != "GET" or status >= FIRST_ERROR):
                    _log(scope, status, time.perf_counter() - start_s, timeline)


def set_request_id(request: Request, answer_id: str) -> None:
    """A request's id is known: its log lines and its answer have it from now on."""
    request.state.answer_id = answer_id
    trace = getattr(request.state, "trace", None)
    about_request(answer_id, "" if trace is None else trace.trace_id)


def _log(scope: Scope, status: int, seconds: float, timeline: RequestTimeline | None) -> None:
    """One line for an HTTP request. Its path is the route's: what a client makes up may quote a prompt."""
    path = routed_path(scope)
    path = getattr(scope.get("route"), "path", path if path in BODIES else "other")
    facts: dict[str, Any] = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
    state = scope["state"]
    facts |= {
        name: state[key] for name, key in (("request_id", "answer_id"), ("x_request_id", "outer_id")) if state.get(key)
    }
    if timeline is not None:
        line = timeline.line()
        names = ("prompt_tokens", "hit_tokens", "output_tokens", "first_token_after_s", "workers", "resumes", "state")
        facts |= {name: line[name] for name in names}
        facts |= {"finish_reasons": line["finish_reasons"]} | ({"error": timeline.error} if timeline.error else {})
    logger.info("%s %s %d", scope["method"], path, status, extra={"facts": facts})
