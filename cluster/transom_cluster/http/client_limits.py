"""Limits each client at one router: a token bucket for its request rate, and a counter of its concurrent requests.

Three kinds of requests have separate limits: those with a body (POST), all others (GET), and streams of the block map.

Example: with `--requests-per-minute 60` a bucket holds at most 60 tokens and gains one per second. A client that was idle for a
minute may send 60 requests at once, and then one per second.

Each router counts only its own requests, so with N routers a client may send up to N times as much.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from transom_core.errors import RateLimited

MAX_IDLE_CLIENTS = 1024  # once there are this many clients, idle ones are forgotten
CONCURRENCY_RETRY_S = 1.0


class ClientLimits:
    """The buckets and counters of all clients for one kind of requests; `kind` is its name in error messages.

    A limit of None means no limit. `clock` returns seconds.
    """

    def __init__(
        self,
        kind: str,
        *,
        per_minute: int | None = None,
        concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = kind
        self._rate = per_minute
        self._max_concurrent = concurrent
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    @property
    def num_clients(self) -> int:
        """The number of clients that have a bucket and a counter here."""
        return len(self._clients)

    @contextlib.contextmanager
    def request(self, client: str) -> Iterator[None]:
        """Count one request of `client` until its response has ended. A refused request does not count.

        Raises:
            RateLimited: the client has too many concurrent requests, or sent too many per minute; `retry_after_s` is the time to
                wait.
        """
        state = self._state(client)
        if self._max_concurrent is not None and state.num_concurrent >= self._max_concurrent:
            raise RateLimited(
                f"This client has {state.num_concurrent} concurrent {self._kind}, which is the limit; wait until one has ended.",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        if self._rate is not None and state.tokens < 1:
            raise RateLimited(
                f"This client has sent more than {self._rate} {self._kind} a minute; wait before the next one.",
                retry_after_s=(1 - state.tokens) * 60 / self._rate,
            )
        state.tokens -= 0 if self._rate is None else 1
        state.num_concurrent += 1
        try:
            yield
        finally:
            state.num_concurrent -= 1

    def _state(self, client: str) -> _Client:
        """Return the client's state, with its bucket refilled up to now."""
        now_s, most = self._clock(), self._rate or 0
        state = self._clients.get(client)
        if state is None:
            self._forget_idle(now_s)
            state = self._clients[client] = _Client(tokens=most, refilled_s=now_s)
        state.tokens = min(most, state.tokens + (now_s - state.refilled_s) * most / 60)
        state.refilled_s = now_s
        return state

    def _forget_idle(self, now_s: float) -> None:
        """Forget clients that sent no request for a minute. Their buckets are full, so a new state would be the same."""
        if len(self._clients) < MAX_IDLE_CLIENTS:
            return
        for client, state in list(self._clients.items()):
            if state.num_concurrent == 0 and now_s - state.refilled_s >= 60:
                del self._clients[client]


class _Client:
    """One client's bucket and counter."""

    __slots__ = ("num_concurrent", "refilled_s", "tokens")

    def __init__(self, *, tokens: float, refilled_s: float) -> None:
        self.tokens = tokens
        self.refilled_s = refilled_s
        self.num_concurrent = 0
