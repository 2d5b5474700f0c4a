"""Limits each client at one router: token buckets limit what a client uses per minute, and counters what it has at once.

Each kind of request has its own limits: requests with a body (POST), all others (GET), costly GETs, and streams of the block map.
Since one POST may become a hundred sequences, the work of POSTs is limited as well (`WorkLimits`): sequences at once, and tokens of
prompts and outputs per minute.

Example: with `--requests-per-minute 60` a bucket holds at most 60 requests and gains one per second. A client that was idle for a
minute may send 60 requests at once, and then one per second. With `--tokens-per-minute 60` a request starts once the bucket holds
as many tokens as its prompt has, or is full. Output tokens are taken out as they come. They may leave the bucket in debt; the next
request then waits until the debt is paid.

Each router counts only its own requests, so with N routers a client may use up to N times as much.
"""

import contextlib
import time
from asyncio import sleep
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from transom_core.config import LimitsConfig
from transom_core.contract import Request
from transom_core.errors import Overloaded, RateLimited, RequestError
from transom_core.fair_cache import CLIENT_SHARE

HELD_BODY_BYTES = 1 << 30  # the limit of the bodies of all requests at one router together
MAX_CLIENT_REQUESTS = 7_500  # of one client at once, if not set; a router takes 10,000 (`app.MAX_ONGOING_REQUESTS`)
MAX_IDLE_CLIENTS = 1024  # once there are this many clients, idle ones are forgotten
REFUSALS_PER_MINUTE = 60  # of a client, that are sent at once
MAX_SLOW_REFUSALS = 1024  # of a client, that wait at once
SLOW_REFUSAL_S = 1.0
CONCURRENCY_RETRY_S = 1.0  # a guess, because the router does not know when requests will end


@dataclass(frozen=True, slots=True)
class Budget:
    """What a client has left of a limit per minute: the limit, what is left of it now, and the seconds until all of it is left."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class TokenBucket:
    """Holds up to `capacity` tokens, and gains `per_s` of them in a second. It is full when it is made; `left` may be a debt."""

    capacity: float
    per_s: float
    refilled_s: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.capacity

    def refill(self, now_s: float) -> None:
        """Add the tokens for the time since the last call."""
        self.left = min(self.capacity, self.left + (now_s - self.refilled_s) * self.per_s)
        self.refilled_s = now_s


@dataclass(slots=True)
class _Client(TokenBucket):
    """One client's bucket, and the counter of what it has at once."""

    num_concurrent: int = 0


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
        self._clients: dict[str, _Client] = {}  # those that have a bucket and a counter here

    @contextlib.contextmanager
    def request(self, client: str, *, cost: int = 1, places: int = 1) -> Iterator[None]:
        """Take `cost` out of a client's bucket, and occupy `places` until the response has ended. A refused request counts nothing.

        Raises:
            RateLimited: the client has too much at once, or has used too much per minute; `retry_after_s` is the time to wait.
            RequestError: the request alone needs more places than the client may have.
        """
        state = self._state(client)
        if self._max_concurrent is not None and places > self._max_concurrent:
            raise RequestError(
                f"The request has {places} {self._kind}, and a client may have {self._max_concurrent} at once; send fewer "
                "prompts, or a smaller n.",
                param="n",
            )
        if self._max_concurrent is not None and state.num_concurrent + places > self._max_concurrent:
            raise RateLimited(
                f"This client has {state.num_concurrent} concurrent {self._kind}, and may have {self._max_concurrent}: that is "
                "the limit; wait until some have ended.",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        if self._rate is not None and state.left < (needed := min(cost, self._rate)):
            raise RateLimited(
                f"This client has used more than {self._rate} {self._kind} a minute; wait before the next request.",
                retry_after_s=(needed - state.left) * 60 / self._rate,
            )
        state.left -= 0 if self._rate is None else cost
        state.num_concurrent += places
        try:
            yield
        finally:
            state.num_concurrent -= places

    def charge(self, client: str, cost: int) -> None:
        """Take more out of a client's bucket, even if that leaves the bucket in debt."""
        if self._rate is not None:
            self._state(client).left -= cost

    def budget(self, client: str) -> Budget | None:
        """Return what a client has left in its bucket; None if there is no limit per minute."""
        if self._rate is None:
            return None
        left = self._state(client).left
        return Budget(self._rate, max(0, int(left)), (self._rate - left) * 60 / self._rate)

    def _state(self, client: str) -> _Client:
        """Return the client's state, with its bucket refilled up to now."""
        now_s, most = self._clock(), self._rate or 0
        state = self._clients.get(client)
        if state is None:
            self._forget_idle(now_s)
            state = self._clients[client] = _Client(most, most / 60, now_s)
        state.refill(now_s)
        return state

    def _forget_idle(self, now_s: float) -> None:
        """Forget clients that have no requests and a full bucket, since a new client's state is the same."""
        if len(self._clients) < MAX_IDLE_CLIENTS:
            return
        for client, state in list(self._clients.items()):
            state.refill(now_s)
            if state.num_concurrent == 0 and state.left >= state.capacity:
                del self._clients[client]


class LimitSet:
    """All limits on clients at one router."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.posts = ClientLimits(
            "requests",
            per_minute=limits.requests_per_minute,
            concurrent=MAX_CLIENT_REQUESTS if limits.concurrent_requests is None else limits.concurrent_requests,
        )
        self.gets = ClientLimits(
            "GET requests", per_minute=limits.get_requests_per_minute, concurrent=limits.concurrent_get_requests
        )
        self.costly_gets = ClientLimits("costly GET requests", per_minute=limits.costly_get_requests_per_minute)
        self.streams = ClientLimits("streams of the block map", concurrent=limits.block_map_streams)
        self.work = WorkLimits(limits)
        self.bodies = HeldBodies(HELD_BODY_BYTES)
        self._refusals = ClientLimits("refusals", per_minute=REFUSALS_PER_MINUTE)
        self._slow_refusals = ClientLimits("refusals", concurrent=MAX_SLOW_REFUSALS)

    async def before_refusal(self, client: str) -> None:
        """Wait for `SLOW_REFUSAL_S` before status 429 is sent, if the client has had more than `REFUSALS_PER_MINUTE`.

        A refusal takes 4 ms of CPU time in Serve's proxy and the router: 16 connections that ask again at once would take a core.
        """
        with contextlib.suppress(RateLimited), self._refusals.request(client):
            return
        with contextlib.suppress(RateLimited), self._slow_refusals.request(client):
            await sleep(SLOW_REFUSAL_S)


class HeldBodies:
    """The bytes of the bodies of all requests that have not ended.

    All clients together may hold `max_bytes`. Once half of that is in use, a client that holds more than a quarter gets no more. So
    one client alone may hold half, and there is room for the others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_client: Counter[str] = Counter()

    def add(self, client: str, num_bytes: int) -> None:
        """Count bytes of a body that have arrived. They count even if this raises.

        Raises:
            RateLimited: the client holds too many bytes.
            Overloaded: all clients together hold too many bytes.
        """
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes
        if self._by_client[client] > self._max_bytes * CLIENT_SHARE and self.num_bytes > self._max_bytes / 2:
            raise RateLimited(
                "The bodies of this client's concurrent requests are too large together; wait until some have ended."
            )
        if self.num_bytes > self._max_bytes:
            raise Overloaded("The bodies of all concurrent requests are too large together; try again later.")

    def remove(self, client: str, num_bytes: int) -> None:
        """Stop counting bytes that `add` has counted, including refused ones."""
        self.num_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class WorkLimits:
    """Limits the work that each client's requests cause: sequences at once, and tokens per minute."""

    def __init__(self, limits: LimitsConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.sequences = ClientLimits("sequences", concurrent=limits.concurrent_sequences, clock=clock)
        self.tokens = ClientLimits("tokens", per_minute=limits.tokens_per_minute, clock=clock)

    @contextlib.contextmanager
    def response(self, client: str, requests: Sequence[Request]) -> Iterator[None]:
        """Count the choices of one HTTP request until its response has ended, and take the tokens of its prompts out of the bucket.
        A prompt counts once, however many choices it has.

        Raises:
            RateLimited, RequestError: see `ClientLimits.request`.
        """
        cost = _num_prompt_tokens(requests)
        with self.sequences.request(client, places=len(requests)), self.tokens.request(client, cost=cost):
            yield

    def give_back(self, client: str, requests: Sequence[Request]) -> None:
        """Put the tokens of prompts back into the bucket: they were refused, or their worker was lost, before any output."""
        self.tokens.charge(client, -_num_prompt_tokens(requests))


def _num_prompt_tokens(requests: Sequence[Request]) -> int:
    return sum(request.num_prompt_tokens for request in requests if request.choice_index == 0)
