"""Plain ASGI layers around the API: counting, API keys, the body limit."""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.metrics import RouterMetrics
from transom_cluster.openai.errors import WireError, body_too_large, wrong_api_key

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
CLIENT_LEFT = 499
MAX_LENGTH_DIGITS = 18  # Python refuses to read thousands of digits


class CountRequests:
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
        status = CLIENT_LEFT

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted_send)
        except Exception:
            status = 500  # answered further out
            raise
        finally:
            route = scope.get("route")
            endpoint = getattr(route, "path", "other")
            self._metrics.finished(endpoint, status, time.perf_counter() - start_s)


class RequireApiKey:
    """Refuses requests without one of the keys, except where monitoring looks."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]  # as curl sends them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._matches(given.strip()):
                await send_error(wrong_api_key(missing=not given), send)
                return
        await self._app(scope, receive, send)

    def _matches(self, given: str) -> bool:
        """Compared with every key in constant time, so that timing tells nothing."""
        if not given:
            return False  # whatever the keys
        presented = given.encode("latin-1")  # the header's bytes again
        return sum([hmac.compare_digest(presented, key) for key in self._keys]) > 0


class LimitBody:
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


async def send_error(error: WireError, send: Send) -> None:
    """OpenAI's error object as a whole response."""
    headers = {"content-type": "application/json", **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.dumps()})
