"""The middleware around the API: metrics, unexpected errors, header limit, API keys, client limits, body limit.

Each class is plain ASGI middleware. `http.api` puts them around the app, with `RequestIdMiddleware` outermost, in this order:

    RequestIdMiddleware > MetricsMiddleware > CrossOriginMiddleware (with --allowed-origins) > ErrorMiddleware
        > HeaderLimitMiddleware > ApiKeyMiddleware > ClientLimitMiddleware > BodyLimitMiddleware > routes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.http.api_keys import ApiKeys, KeyOwner, address_digest, shows_all_clients
from transom_cluster.http.client_limits import Budget, ClientLimits, HeldBodies, LimitSet
from transom_cluster.http.declared_statuses import OTHER
from transom_cluster.http.request_state import request_state, routed_path
from transom_cluster.openai.answer.error_responses import (
    WireError,
    admin_key_required,
    body_too_large,
    body_too_slow,
    headers_too_large,
    wire_error,
    wrong_api_key,
)
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_core.errors import RateLimited

logger = logging.getLogger("transom.router")

# These paths need no key: Kubernetes' probes of /health send none, and the block map's page itself holds no data.
OPEN_PATHS = frozenset({"/health", "/blocks", "/blocks/demo.bin"})
TIMELINES_PATH = "/debug/requests"
COSTLY_PATHS = frozenset({"/metrics", "/metrics/sd", TIMELINES_PATH})  # the router asks other processes for the answer
BLOCK_STREAM_PATH = "/blocks/stream"
OPEN_FOLDER = "/blocks/assets/"  # the block map page's own files
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # no route reads the body of a request with one of these methods
MAX_LENGTH_DIGITS = 18  # `int` raises for thousands of digits, so a longer Content-Length is not converted


class MetricsMiddleware:
    """Counts and times every request under its route's path, so that metrics have few labels."""

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

        async def send_and_note(message: Message) -> None:
            outcome.message_sending(message)
            await send(message)
            outcome.message_sent(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            endpoint, elapsed_s = _endpoint(scope), time.perf_counter() - start_s
            self._metrics.finished(endpoint, outcome.status, elapsed_s, request_id=state.engine_request_id)
            if outcome.break_reason is not None:
                self._metrics.broke_off(endpoint, outcome.break_reason)


def _endpoint(scope: Scope) -> str:
    """Return the path of the request's route. For a request that was refused before routing it is the request's path if a route has
    the same path, else OTHER."""
    route = scope.get("route")
    if route is not None:
        path: str = getattr(route, "path", OTHER)
        return path
    route_paths, path = (getattr(one, "path", None) for one in scope["app"].routes), routed_path(scope)
    return path if path in route_paths else OTHER


class ErrorMiddleware:
    """Sends status 500 for an unexpected error, and logs where it was raised.

    It catches every error, because the web server would log the error's message, which may quote a prompt.
    """

    def __init__(self, app: ASGIApp, show_messages: bool) -> None:
        self._app = app
        self._show_messages = show_messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. A response that has begun stays incomplete, so that the client notices the error."""
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnect:
            pass  # the client disconnected while it sent its body
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
    """Sends status 431 for a request line and headers over the limit."""

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
    """Refuses requests without a valid key, and stores the client of every other request in the request's state.

    If there are admin keys, they give access to every route, and only they give access to routes that show all clients' data.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, admins: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._admins = admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or send status 401 or 403."""
        if scope["type"] == "http":
            given, path = _bearer_token(Headers(scope=scope).get("authorization", "")), routed_path(scope)
            admin = self._admins.owner_of(given) if given and self._admins.are_required else None
            client = self._keys.owner_of(given) if given and self._keys.are_required else None
            needs_admin = self._admins.are_required and shows_all_clients(path)
            if needs_admin and admin is None and client is not None:
                await send_error(admin_key_required(), send)
                return
            needs_key = needs_admin or (self._keys.are_required and not _is_open(path))
            if needs_key and admin is None and client is None:
                await send_error(wrong_api_key(missing=not given), send)
                return
            self._note_client(scope, client or admin)
        await self._app(scope, receive, send)

    def _note_client(self, scope: Scope, owner: KeyOwner | None) -> None:
        state = request_state(scope)
        if owner is not None:
            state.client = state.sharer = owner.client
            state.weight = owner.weight
        elif address := (scope.get("client") or ("",))[0]:
            state.sharer = address_digest(address)


class ClientLimitMiddleware:
    """Sends status 429 for a client's requests beyond its limits. A request counts until the last byte of its response.

    Where there are limits by the minute, responses to POST requests have OpenAI's headers about them (`x-ratelimit-...`).
    Paths that need no key have no limits: the server cannot tell their clients apart, and a load balancer must always get its
    answer.
    """

    def __init__(self, app: ASGIApp, limits: LimitSet) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = request_state(scope).counted_as
        if scope["method"] == "POST":
            send = self._with_budgets(client, send)
        with contextlib.ExitStack() as stack:
            try:
                for limits in self._limits_of(scope["method"], routed_path(scope)):
                    stack.enter_context(limits.request(client))
            except RateLimited as error:
                await send_error(wire_error(error), send)
                return
            await self._app(scope, receive, send)

    def _with_budgets(self, client: str, send: Send) -> Send:
        """Add to a response what the client has left of its limits by the minute."""

        async def send_with_budgets(message: Message) -> None:
            if message["type"] == "http.response.start":
                budgets = {
                    "requests": self._limits.posts.budget(client),
                    "tokens": self._limits.work.tokens.budget(client),
                }
                more = [pair for name, budget in budgets.items() if budget for pair in _budget_headers(name, budget)]
                message = {**message, "headers": [*message.get("headers", ()), *more]} if more else message
            await send(message)

        return send_with_budgets

    def _limits_of(self, method: str, path: str) -> tuple[ClientLimits, ...]:
        if method == "POST":
            return (self._limits.posts,)
        if path == BLOCK_STREAM_PATH:
            return (self._limits.streams, self._limits.gets)
        if path in COSTLY_PATHS or path.startswith(f"{TIMELINES_PATH}/"):
            return (self._limits.gets, self._limits.costly_gets)
        return () if _is_open(path) else (self._limits.gets,)


class BodyLimitMiddleware:
    """Sends status 413 for a body over the limit, as soon as its Content-Length or the bytes read so far show it, and status 408
    for one that is not whole `body_timeout_s` after the app began to read it.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_timeout_s: float, bodies: HeldBodies) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_declared_larger(Headers(scope=scope).get("content-length", "")):
            await send_error(body_too_large(self._max_body_bytes).error, send)
            return
        if scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        state = request_state(scope)
        body = _Body(state.counted_as, self._max_body_bytes, self._body_timeout_s, self._bodies)
        try:
            await self._app(scope, partial(body.receive, receive), send)
        finally:
            self._bodies.remove(body.client, body.num_bytes)

    def _is_declared_larger(self, length: str) -> bool:
        if not length.isdecimal():
            return False
        return len(length) > MAX_LENGTH_DIGITS or int(length) > self._max_body_bytes


class _Body:
    """Receives one request's body, and checks its size and the time that it takes to arrive."""

    def __init__(self, client: str, max_bytes: int, timeout_s: float, bodies: HeldBodies) -> None:
        self.client, self.num_bytes = client, 0
        self._max_bytes, self._timeout_s, self._bodies = max_bytes, timeout_s, bodies
        self._limit_s, self._is_whole = 0.0, False

    async def receive(self, receive: Receive) -> Message:
        """Return the next message of `receive`.

        Raises:
            HttpError: the body is too large (status 413), or did not arrive in time (408).
            RateLimited, Overloaded: the bodies of this client or of all clients are too large together.
        """
        if self._is_whole:  # the next message says that the client has disconnected, and may come at any time
            return await receive()
        self._limit_s = self._limit_s or asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._limit_s):
                message = await receive()
        except TimeoutError:
            raise body_too_slow(self._timeout_s) from None
        self._is_whole = not message.get("more_body", False)
        num_new = len(message.get("body", b""))
        if self.num_bytes + num_new > self._max_bytes:
            raise body_too_large(self._max_bytes)
        self.num_bytes += num_new
        self._bodies.add(self.client, num_new)
        return message


def _is_open(path: str) -> bool:
    """Return whether a path needs no key, because it shows nothing about requests or about what the server does."""
    return path in OPEN_PATHS or (path.startswith(OPEN_FOLDER) and "/" not in path.removeprefix(OPEN_FOLDER))


def _budget_headers(name: str, budget: Budget) -> list[tuple[bytes, bytes]]:
    values = {"limit": str(budget.limit), "remaining": str(budget.remaining), "reset": duration_text(budget.reset_s)}
    return [(f"x-ratelimit-{which}-{name}".encode(), value.encode()) for which, value in values.items()]


def duration_text(seconds: float) -> str:
    """Return a duration in the form of OpenAI's headers: `0s`, `120ms`, `7.66s`, `6m0s`."""
    if seconds < 1:
        return f"{ms}ms" if (ms := round(seconds * 1000)) else "0s"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:g}s"


def _bearer_token(authorization: str) -> bytes:
    """Return the bytes of the bearer token; b"" for any other authorization scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _header_bytes(scope: Scope) -> int:
    """Return roughly how many bytes the request line and the headers had on the wire."""
    num_bytes = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
    return num_bytes + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


async def send_error(error: WireError, send: Send) -> None:
    """Send a whole response with OpenAI's error object."""
    headers = {"content-type": "application/json", **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.dumps()})
