"""`AdmissionMiddleware`: refuses requests by their headers, API key, client and body, before a route handles them."""

import asyncio
import contextlib
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transom_cluster.http.api_keys import ApiKeys, address_digest, needs_admin_key
from transom_cluster.http.client_limits import Budget, ClientLimits, HeldBodies, LimitSet
from transom_cluster.http.request_middleware import error_response
from transom_cluster.http.request_state import request_state, routed_path
from transom_cluster.openai.answer.error_responses import HttpError
from transom_core.config import ServerConfig
from transom_core.errors import RateLimited

# These paths need no key: Kubernetes' probes of /health send none, and the page that draws the KV blocks has no data.
OPEN_PATHS = frozenset({"/health", "/blocks"})
OPEN_FOLDER = "/blocks/assets/"  # that page's own files
TIMELINES_PATH = "/debug/requests"
COSTLY_PATHS = frozenset({"/metrics", "/metrics/sd", TIMELINES_PATH})  # the router asks other processes for the answer
BLOCK_STREAM_PATH = "/blocks/stream"
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # methods of requests whose body no route reads
MAX_LENGTH_DIGITS = 18  # `int` raises for thousands of digits, so a longer Content-Length is not converted


class AdmissionMiddleware:
    """Refuses requests that the server does not take, and stores the client of every other request in the request's state.

    In this order it checks the size of the headers, the API key, the client's limits and the declared size of the body. While the
    app reads the body, it checks the body's size, its time to arrive, and the total size of the bodies that the server holds. If
    there are admin keys, only they open the routes that show all clients' data; they open every other route, too.

    A request counts for its client's limits until the last byte of its response. If there are limits per minute, responses to POST
    requests say in OpenAI's headers what is left of them (`x-ratelimit-...`). GET requests that need no key have no limits: the
    server cannot tell their clients apart, and a load balancer must always get its answer.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys, admins: ApiKeys, limits: LimitSet) -> None:
        self._app = app
        self._max_header_bytes = config.limits.max_header_bytes
        self._max_body_bytes, self._body_timeout_s = config.max_body_bytes, config.limits.body_timeout_s
        self._keys = keys
        self._admins = admins
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with contextlib.ExitStack() as stack:
            try:
                self._check_headers(scope)
                self._check_key(scope)
                client = request_state(scope).counted_as  # the key's owner, or without a key the address
                send = self._with_budgets(client, send, is_post=scope["method"] == "POST")
                for limits in self._limits_of(scope["method"], routed_path(scope)):
                    stack.enter_context(limits.request(client))
                self._check_declared_length(scope)
            except (HttpError, RateLimited) as error:
                await error_response(error, scope)(scope, receive, send)
                return
            if scope["method"] not in _WITHOUT_BODY:
                body = _Body(client, self._max_body_bytes, self._body_timeout_s, self._limits.bodies)
                stack.callback(body.forget)
                receive = partial(body.receive, receive)
            await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        """Check the size of the request line and the headers, as estimated from the ASGI scope, which has them parsed."""
        num_bytes = len(scope.get("raw_path") or scope["path"].encode()) + len(scope.get("query_string", b""))
        num_bytes += sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
        if num_bytes > self._max_header_bytes:
            raise HttpError(
                431,
                f"The request's headers are larger than {self._max_header_bytes:,} bytes; send less, or raise "
                "--max-header-bytes.",
                code="request_headers_too_large",
            )

    def _check_key(self, scope: Scope) -> None:
        """Check the API key, and store its client in the request's state."""
        given, path = _presented_key(Headers(scope=scope)), routed_path(scope)
        admin = self._admins.owner_of(given) if given and self._admins.are_required else None
        client = self._keys.owner_of(given) if given and self._keys.are_required else None
        needs_admin = needs_admin_key(path, has_keys=self._keys.are_required, has_admins=self._admins.are_required)
        if needs_admin and admin is None and client is not None:
            raise HttpError(
                403,
                "This route shows data of all clients together, or takes time from them; send a key from --admin-api-key-file.",
                kind="permission_error",
                code="admin_api_key_required",
            )
        needs_key = needs_admin or (self._keys.are_required and not _is_open(path))
        if needs_key and admin is None and client is None:
            reason = "The API key is wrong" if given else "No API key was given"
            raise HttpError(
                401,
                f"{reason}; send a valid one as 'Authorization: Bearer KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        # `client` decides which requests the caller may see. Limits, and turns in queues, count the caller as `sharer`.
        state, owner = request_state(scope), client or admin
        if owner is not None:
            state.client = state.sharer = owner.client
            state.weight = owner.weight
        elif address := (scope.get("client") or ("",))[0]:
            state.sharer = address_digest(address)

    def _limits_of(self, method: str, path: str) -> tuple[ClientLimits, ...]:
        """Return the limits that count a request with this method and path."""
        if method == "POST":
            return (self._limits.posts,)
        if path == BLOCK_STREAM_PATH:
            return (self._limits.streams, self._limits.gets)
        if path in COSTLY_PATHS or path.startswith(f"{TIMELINES_PATH}/"):
            return (self._limits.gets, self._limits.costly_gets)
        return () if _is_open(path) else (self._limits.gets,)

    def _check_declared_length(self, scope: Scope) -> None:
        """Check the Content-Length, if there is one, before any of the body is read; `_Body` counts what arrives."""
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and (len(length) > MAX_LENGTH_DIGITS or int(length) > self._max_body_bytes):
            raise body_too_large(self._max_body_bytes)

    def _with_budgets(self, client: str, send: Send, *, is_post: bool) -> Send:
        """Return `send` with two additions: it delays status 429 to a client that keeps sending, and writes into the response to a
        POST what is left of the client's limits per minute."""

        async def send_with_budgets(message: Message) -> None:
            if message.get("status") == 429:  # a refusal because of a limit on clients
                await self._limits.before_refusal(client)
            if is_post and message["type"] == "http.response.start":
                budgets = {
                    "requests": self._limits.posts.budget(client),
                    "tokens": self._limits.work.tokens.budget(client),
                }
                more = [pair for name, budget in budgets.items() if budget for pair in _budget_headers(name, budget)]
                message = {**message, "headers": [*message.get("headers", ()), *more]} if more else message
            await send(message)

        return send_with_budgets


class _Body:
    """Receives one request's body, and checks its size and the time that it takes to arrive after the app began to read it."""

    def __init__(self, client: str, max_bytes: int, timeout_s: float, bodies: HeldBodies) -> None:
        self._client, self._num_bytes = client, 0
        self._max_bytes, self._timeout_s, self._bodies = max_bytes, timeout_s, bodies
        self._deadline_s, self._is_whole = 0.0, False  # no deadline until the app reads

    async def receive(self, receive: Receive) -> Message:
        """Return the next message of `receive`.

        Raises:
            HttpError: the body is too large (status 413), or did not arrive in time (408).
            RateLimited, Overloaded: the total size of this client's bodies, or of all clients' bodies, is too large.
        """
        if self._is_whole:  # the next message says that the client has disconnected, and may come at any time
            return await receive()
        self._deadline_s = self._deadline_s or asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await receive()
        except TimeoutError:
            raise HttpError(
                408,
                f"The request body was not complete after {self._timeout_s:g} s; send it faster, or raise --body-timeout-s.",
                kind="timeout_error",
                code="request_timeout",
                headers={"connection": "close"},  # it cannot carry another request: the rest of the body may still come
            ) from None
        self._is_whole = not message.get("more_body", False)
        num_new = len(message.get("body", b""))
        if self._num_bytes + num_new > self._max_bytes:
            raise body_too_large(self._max_bytes)
        self._num_bytes += num_new
        self._bodies.add(self._client, num_new)
        return message

    def forget(self) -> None:
        """Stop counting the body's bytes: the request has ended."""
        self._bodies.remove(self._client, self._num_bytes)


def body_too_large(max_body_bytes: int) -> HttpError:
    """Return the error for a body that is, or is declared to be, over the limit."""
    message = f"The request body is larger than {max_body_bytes:,} bytes; send less, or raise --max-body-bytes."
    return HttpError(413, message, code="request_body_too_large")


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


def _presented_key(headers: Headers) -> bytes:
    """Return the bytes of the bearer token, or else of the header in which Anthropic's clients send keys; b"" without either."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.strip().encode("latin-1")
