"""The outermost middleware: it creates the request's state and span, sends the response id in a header, and writes the access log.

Response id: the id that this server gives a generation, such as `chatcmpl-...`; it is in the body, the header and all log lines.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.http.request_state import RequestState, attach_request_state, routed_path
from transom_cluster.openai.openapi_document import POST_ENDPOINTS
from transom_cluster.telemetry.request_outcome import CLIENT_DISCONNECTED_STATUS
from transom_cluster.telemetry.router_tracing import RequestTrace, RouterTracing
from transom_cluster.telemetry.span_attributes import response_attributes
from transom_core.logs import about_request, request_log_scope

logger = logging.getLogger("transom.access")

FIRST_ERROR_STATUS = 400
ID_HEADER = "x-request-id"
MAX_ID_CHARS = 128


class RequestIdMiddleware:
    """Starts and ends each request's span, sends its response id in the `x-request-id` header, and logs the request if
    `logs_access`.

    If a request arrives with an `x-request-id`, this middleware does not send another one: Ray Serve adds the header to every
    request that lacks it, and sends it back itself. The response id is then only in the body. GET requests get no span, and a log
    line only if they fail.
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
        start_s, status, headers = time.perf_counter(), CLIENT_DISCONNECTED_STATUS, Headers(scope=scope)
        trace = self._begin_trace(scope, headers)
        state = RequestState(x_request_id=headers.get(ID_HEADER, "")[:MAX_ID_CHARS], trace=trace)
        attach_request_state(scope, state)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if state.response_id and ID_HEADER not in headers:
                    MutableHeaders(scope=message)[ID_HEADER] = state.response_id
            await send(message)

        with request_log_scope():
            if trace is not None:
                about_request("", trace.trace_id)
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                if trace is not None:
                    timeline = state.timeline
                    trace.describe(response_attributes(timeline))
                    trace.end(status, timeline.error if timeline is not None else "", time.time())
                if self._logs_access and (scope["method"] != "GET" or status >= FIRST_ERROR_STATUS):
                    _log_access(scope, state, status, time.perf_counter() - start_s)

    def _begin_trace(self, scope: Scope, headers: Headers) -> RequestTrace | None:
        if self._tracing is None or scope["method"] != "POST" or (path := routed_path(scope)) not in POST_ENDPOINTS:
            return None
        return self._tracing.begin(path, headers, time.time())


def set_response_id(state: RequestState, response_id: str) -> None:
    """Give the request its response id, which its log lines and its response header have from now on."""
    state.response_id = response_id
    about_request(response_id, "" if state.trace is None else state.trace.trace_id)


def _log_access(scope: Scope, state: RequestState, status: int, seconds: float) -> None:
    """Log one line for a request. The line has the route's pattern instead of the path, since a path that a client made up may
    quote a prompt."""
    path = routed_path(scope)
    path = getattr(scope.get("route"), "path", path if path in POST_ENDPOINTS else "other")
    facts: dict[str, Any] = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
    if state.response_id:
        facts["request_id"] = state.response_id
    if state.x_request_id:
        facts["x_request_id"] = state.x_request_id
    if state.timeline is not None:
        line = state.timeline.summary()
        names = ("prompt_tokens", "hit_tokens", "output_tokens", "first_token_after_s", "workers", "resumes", "state")
        facts |= {name: line[name] for name in (*names, "finish_reasons")}
        if state.timeline.error:
            facts["error"] = state.timeline.error
    logger.info("%s %s %d", scope["method"], path, status, extra={"facts": facts})
