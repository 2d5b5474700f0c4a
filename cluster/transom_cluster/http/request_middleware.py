"""The outer middleware: it creates each request's state and span, counts and logs it, and answers unexpected errors.

`http.api` puts the middleware, each of them plain ASGI, around the app in this order:

    RequestMiddleware > CORSMiddleware (with --allowed-origins) > ErrorMiddleware > AdmissionMiddleware > routes

Response id: the id that this server gives a generation, such as `chatcmpl-...`; it is in the body, the header and all log lines.
"""

import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.http.request_state import STATE_KEY, RequestState, request_state, routed_path
from transom_cluster.openai.answer.error_responses import wire_error
from transom_cluster.openai.messages.object_types import is_messages_path, messages_error
from transom_cluster.openai.openapi_document import POST_ENDPOINTS
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.router_tracing import RequestTrace, RouterTracing
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_core.logs import about_request, request_log_scope

logger = logging.getLogger("transom.router")
access_logger = logging.getLogger("transom.access")

OTHER = "other"  # the endpoint under which paths that do not exist are counted
FIRST_ERROR_STATUS = 400  # GET requests with a lower status are not logged
ID_HEADER = "x-request-id"
MESSAGES_ID_HEADER = "request-id"  # where Anthropic's clients look for it
MAX_ID_CHARS = 128  # more characters of an incoming `x-request-id` are cut off


class RequestMiddleware:
    """Creates each request's state and span, sends its response id in the `x-request-id` header, counts and times it under its
    route's path, and logs it if `logs_access`.

    If a request arrives with an `x-request-id`, this middleware does not send another one: Ray Serve adds the header to every
    request that lacks it, and sends it back itself. The response id is then only in the body. GET requests get no span, and a log
    line only if they fail.
    """

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, tracing: RouterTracing | None, logs_access: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s, headers = time.perf_counter(), Headers(scope=scope)
        trace = self._begin_trace(scope, headers)
        state = RequestState(x_request_id=headers.get(ID_HEADER, "")[:MAX_ID_CHARS], trace=trace)
        scope.setdefault("state", {})[STATE_KEY] = state

        async def send_with_id(message: Message) -> None:
            state.outcome.message_sending(message)
            if message["type"] == "http.response.start" and state.response_id and ID_HEADER not in headers:
                MutableHeaders(scope=message)[ID_HEADER] = state.response_id
            if message["type"] == "http.response.start" and state.response_id and is_messages_path(routed_path(scope)):
                MutableHeaders(scope=message)[MESSAGES_ID_HEADER] = state.response_id
            await send(message)
            state.outcome.message_sent(message)

        with request_log_scope():
            if trace is not None:
                about_request("", trace.trace_id)
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                self._end(scope, state, time.perf_counter() - start_s)

    def _begin_trace(self, scope: Scope, headers: Headers) -> RequestTrace | None:
        if self._tracing is None or scope["method"] != "POST" or (path := routed_path(scope)) not in POST_ENDPOINTS:
            return None
        return self._tracing.begin(path, headers)

    def _end(self, scope: Scope, state: RequestState, seconds: float) -> None:
        """Count a request that has ended, end its span, and log it."""
        endpoint, outcome = _endpoint(scope), state.outcome
        self._metrics.finished(endpoint, outcome.status, seconds, request_id=state.engine_request_id)
        if outcome.break_reason is not None:
            self._metrics.broken_answers.of(endpoint, outcome.break_reason).inc()
        if state.trace is not None:
            state.trace.end(outcome.sent_status, state.timeline)
        if self._logs_access and (scope["method"] != "GET" or outcome.sent_status >= FIRST_ERROR_STATUS):
            _log_access(scope["method"], endpoint, state, seconds)


def set_response_id(state: RequestState, response_id: str) -> None:
    """Give the request its response id, which its log lines and its response header have from now on."""
    state.response_id = response_id
    about_request(response_id, "" if state.trace is None else state.trace.trace_id)


def _endpoint(scope: Scope) -> str:
    """Return the path of the request's route. For a request that was refused before routing it is the request's path if a route has
    the same path, else OTHER: a path that a client made up may quote a prompt."""
    route = scope.get("route")
    if route is not None:
        path: str = getattr(route, "path", OTHER)
        return path
    route_paths, path = (getattr(one, "path", None) for one in scope["app"].routes), routed_path(scope)
    return path if path in route_paths else OTHER


def _log_access(method: str, endpoint: str, state: RequestState, seconds: float) -> None:
    """Log one line for a request."""
    status = state.outcome.sent_status
    facts: dict[str, Any] = {"method": method, "path": endpoint, "status": status, "seconds": round(seconds, 6)}
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
    access_logger.info("%s %s %d", method, endpoint, status, extra={"facts": facts})


class ErrorMiddleware:
    """Sends status 500 for an unexpected error, and logs where it was raised.

    It catches every error, because the web server would log the error's message, which may quote a prompt.
    """

    def __init__(self, app: ASGIApp, show_messages: bool) -> None:
        self._app = app
        self._show_messages = show_messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. A response that has begun stays incomplete, so that the client notices the error."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass  # the client has disconnected
        except Exception as error:
            if scope["type"] != "http":
                raise
            details = "".join(traceback_lines(error, with_messages=self._show_messages))
            logger.error("%s %s failed.\n%s", scope["method"], scope["path"], details)
            outcome = request_state(scope).outcome
            if outcome.has_begun:
                outcome.break_with(wire_error(error))
            else:
                await error_response(error, scope)(scope, receive, send)


def error_response(error: BaseException, scope: Scope) -> Response:
    """Return the whole response to a request that fails, with an error object in the form of the route's API."""
    wire = wire_error(error)
    if not is_messages_path(routed_path(scope)):
        return Response(wire.dumps(), wire.status, wire.headers, media_type="application/json")
    status, body = messages_error(wire, request_state(scope).response_id)
    return JSONResponse(body, status, wire.headers)
