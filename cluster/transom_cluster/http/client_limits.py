"""How much one client may ask of one router: a token bucket for its rate, a counter for what it has at once.

Every router counts for itself: with N routers a client may do up to N times as much.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from transom_worker.config import LimitsConfig
from transom_worker.errors import RateLimited

MAX_QUIET_CLIENTS = 1024  # remembered beyond those that are busy
BUSY_RETRY_S = 1.0


class ClientLimits:
    """Counts requests by client. A client that was quiet for a minute may send a minute's requests at once."""

    def __init__(self, limits: LimitsConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = limits.requests_per_minute
        self._most_at_once = limits.concurrent_requests
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    @contextlib.contextmanager
    def request(self, client: str) -> Iterator[None]:
        """One request of this client, for as long as its answer takes; one that is refused does not count.

        Raises:
            RateLimited: the client has too many at once, or sent too many; when to come back is in it.
        """
        state = self._state(client)
        if self._most_at_once is not None and state.num_at_once >= self._most_at_once:
            raise RateLimited(
                f"This client has {state.num_at_once} requests at once, which is all it may have; wait until one has ended.",
                retry_after_s=BUSY_RETRY_S,
            )
        if self._rate is not None and state.tokens < 1:
            raise RateLimited(
                f"This client has sent more than {self._rate} requests a minute; wait before the next one.",
                retry_after_s=(1 - state.tokens) * 60 / self._rate,
            )
        state.tokens -= 0 if self._rate is None else 1
        state.num_at_once += 1
        try:
            yield
        finally:
            state.num_at_once -= 1

    def _state(self, client: str) -> _Client:
        """What this client has left now."""
        now_s, most = self._clock(), self._rate or 0
        state = self._clients.get(client)
        if state is None:
            self._forget_quiet(now_s)
            state = self._clients[client] = _Client(tokens=most, seen_s=now_s)
        state.tokens = min(most, state.tokens + (now_s - state.seen_s) * most / 60)
        state.seen_s = now_s
        return state

    def _forget_quiet(self, now_s: float) -> None:
        """A client without requests for a minute is as good as a new one."""
        if len(self._clients) < MAX_QUIET_CLIENTS:
            return
        for client, state in list(self._clients.items()):
            if state.num_at_once == 0 and now_s - state.seen_s >= 60:
                del self._clients[client]


class _Client:
    __slots__ = ("num_at_once", "seen_s", "tokens")

    def __init__(self, *, tokens: float, seen_s: float) -> None:
        self.tokens = tokens
        self.seen_s = seen_s
        self.num_at_once = 0
