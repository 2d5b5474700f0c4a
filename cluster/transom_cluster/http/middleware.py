"""Plain ASGI layers around the API, outermost first: counting, bugs, header limit, API keys, clients' limits, body limit."""

from __future__ import annotations

import contextlib
import logging
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.http.api_keys import ApiKeys, shows_all_clients
from transom_cluster.http.client_limits import ClientLimits
from transom_cluster.http.declared_statuses import OTHER
from transom_cluster.http.request_state import request_state
from transom_cluster.http.routed_path import routed_path
from transom_cluster.openai.errors import (
    WireError,
    body_too_large,
    headers_too_large,
    not_an_admin,
    wire_error,
    wrong_api_key,
)
from transom_cluster.telemetry.request_timeline import ONLY_CLIENT
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_worker.errors import RateLimited

logger = logging.getLogger("transom.router")

OPEN_PATHS = frozenset({"/health", "/blocks", "/blocks/demo.bin"})  # kubelets send no keys; the page holds no data
OPEN_FOLDER = "/blocks/assets/"  # the page's own files
MAX_LENGTH_DIGITS = 18  # Python refuses to read thousands of digits


class MetricsMiddleware:
    """Counts and times every request by the route's path, so that labels stay few."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        state = request_state(scope)
        outcome = state.outcome

        async def counted_send(message: Message) -> None:
            outcome.message_sending(message)
            await send(message)
            outcome.message_sent(message)

        try:
            await self._app(scope, receive, counted_send)
        finally:
            endpoint, elapsed_s = _endpoint(scope), time.perf_counter() - start_s
            self._metrics.finished(endpoint, outcome.status, elapsed_s, request_id=state.engine_request_id)
            if outcome.break_reason is not None:
                self._metrics.broke_off(endpoint, outcome.break_reason)


def _endpoint(scope: Scope) -> str:
    """The path of the request's route; of one that was refused before it came to a route, the path if there is such a route."""
    route = scope.get("route")
    if route is not None:
        path: str = getattr(route, "path", OTHER)
        return path
    known, path = (getattr(one, "path", None) for one in scope["app"].routes), routed_path(scope)
    return path if path in known else OTHER


class ErrorMiddleware:
    """Answers 500 for what nobody expected, and logs where it happened.

    Caught here, since a web server logs what reaches it with its message, and a message may quote a prompt.
    """

    def __init__(self, app: ASGIApp, show_messages: bool) -> None:
        self._app = app
        self._show_messages = show_messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. A response that has begun is left incomplete, so that the client sees it broken off."""
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            pass  # left while sending its body
        except Exception as error:
            if scope["type"] != "http":
                raise
            details = "".join(traceback_lines(error, with_messages=self._show_messages))
            logger.error("%s %s failed.\n%s", scope["method"], scope["path"], details)
            if has_begun:
                request_state(scope).outcome.break_with(wire_error(error))
            else:
                await send_error(wire_error(error), send)


class HeaderLimitMiddleware:
    """Answers 431 for a request line and headers over the limit."""

    def __init__(self, app: ASGIApp, max_header_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and _header_bytes(scope) > self._max_header_bytes:
            await send_error(headers_too_large(self._max_header_bytes), send)
            return
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Refuses requests without one of the keys, and names the client of the others.

    Where there are keys of admins, these open everything, and nothing else opens what shows all clients together.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, admins: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._admins = admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] == "http":
            given, path = _bearer_token(Headers(scope=scope).get("authorization", "")), routed_path(scope)
            admin = self._admins.client(given) if given and self._admins.are_required else None
            client = self._keys.client(given) if given and self._keys.are_required else None
            is_for_admins = self._admins.are_required and shows_all_clients(path)
            if is_for_admins and admin is None and client is not None:
                await send_error(not_an_admin(), send)
                return
            wants_key = is_for_admins or (self._keys.are_required and not _is_open(path))
            if wants_key and admin is None and client is None:
                await send_error(wrong_api_key(missing=not given), send)
                return
            request_state(scope).client = client or admin or ONLY_CLIENT
        await self._app(scope, receive, send)


class ClientLimitMiddleware:
    """Answers 429 for a client's requests beyond its own limits. A request counts until the last byte of its answer."""

    def __init__(self, app: ASGIApp, limits: ClientLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it. What only looks (GET) is not counted."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._limits.request(request_state(scope).client))
            except RateLimited as error:
                await send_error(wire_error(error), send)
                return
            await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Answers 413 for a body over the limit, by its Content-Length or while it is read."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_declared_larger(Headers(scope=scope).get("content-length", "")):
            await send_error(body_too_large(self._max_body_bytes).error, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _is_declared_larger(self, length: str) -> bool:
        if not length.isdecimal():
            return False
        return len(length) > MAX_LENGTH_DIGITS or int(length) > self._max_body_bytes

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise body_too_large(self._max_body_bytes)
            return message

        return counted_receive


def _is_open(path: str) -> bool:
    """Whether a path needs no key: nothing there tells of requests, or of what the server does."""
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDER) and "/" not in path.removeprefix(OPEN_FOLDER))


def _bearer_token(authorization: str) -> bytes:
    """The token's own bytes; empty for any other scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _header_bytes(scope: Scope) -> int:
    """About what the request line and the headers took on the wire."""
    num_bytes = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
    return num_bytes + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


async def send_error(error: WireError, send: Send) -> None:
    """OpenAI's error object as a whole response."""
    headers = {"content-type": "application/json", **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.dumps()})
