"""`RouterOutbox`: collects what a worker has to tell one router, and decides when the next message is due.

A message costs a router 0.3 to 0.9 ms of CPU time, even if it carries little (docs/routing.md), and 200 workers may send to each
router. So there are three kinds of content:

- **events** of requests are due at once, and their message carries all news too;
- **news** (changes of the prefix index, or a load that would change a router's decisions) is due `NEWS_PERIOD_S` after the last
  message, which means at once after silence;
- a **heartbeat** is due `HEARTBEAT_S` after the last message, so that a router notices a worker that has become silent. It
  carries even small changes of the load.

Example with steps of 20 ms: a router whose requests run here learns of everything within a step. A router without requests here
gets one message a second while other routers keep the worker busy, and one in five seconds from an idle worker.

Waiting content is joined: a router that reads slowly gets fewer, larger messages, without changes of the index that cancel out.

Ray does not tell a stream that its reader's process was killed. So an outbox ends by itself if its router has not called the worker
for `SILENT_ROUTER_S`: otherwise the router's requests would go on, and the worker's replica could not leave.
"""

import asyncio
import math
import time
from collections.abc import Callable

from transom_core.contract import FetchSpeed, OutputEvent, WorkerLoad, WorkerMessage
from transom_worker.kvcache.prefix.change_log import PendingChanges

NEWS_PERIOD_S = 1.0
HEARTBEAT_S = 5.0
SILENT_ROUTER_S = 60.0  # routers call every 20 s (`RouterTimings.presence_s`)

# A load is news if it differs from the last one that was sent by more than one of these.
REQUESTS_SHARE = 1 / 16  # share of the running and waiting requests, and more than one request
TOKENS = 256  # waiting tokens; for comparison, routers count a running request as 200 (`routing.policy`)
TOKENS_SHARE = 1 / 8  # share of the waiting tokens
PRESSURE = 0.02  # difference in `used_share ** 8`, the routers' estimate of the wait for blocks in answer times
RATES_FACTOR = 1.25  # factor between two measured rates


class RouterOutbox:
    """The messages to one router: `put` adds content, and `receive` waits until a message is due.

    All methods run on one event loop; `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events: list[OutputEvent] = []
        self._changes = PendingChanges()
        self._load = WorkerLoad()
        self._taken: list[str] = []
        self._identity: str | None = None  # to be sent
        self._sent_load: WorkerLoad | None = None
        self._sent_s = -math.inf
        self._heard_s = clock()
        self._is_closed = False
        self._looks_again_s = math.inf  # the time at which a waiting `receive` wakes up by itself
        self._changed = asyncio.Event()

    def put(self, message: WorkerMessage) -> None:
        """Add a message of the engine's thread: the events of this router's requests, changes of the index, load."""
        self._events += message.events
        self._taken += message.taken
        if message.kv is not None:
            self._changes.add(message.kv)
        if message.load is not None:
            self._load = message.load
        self._identity = message.identity or self._identity
        if self.due_s() < self._looks_again_s:
            self._changed.set()

    def close(self) -> None:
        """End the stream; what has not been sent is lost."""
        self._is_closed = True
        self._changed.set()

    def hear(self) -> None:
        """Note that the router is there."""
        self._heard_s = self._clock()

    def due_s(self) -> float:
        """Return when the next message is due, on the clock; infinite before the whole index was added."""
        if self._sent_load is None:
            return -math.inf if self._changes.has_whole else math.inf
        if self._events or self._changes.has_whole:
            return -math.inf
        has_news = not self._changes.is_empty or is_news(self._sent_load, self._load)
        return self._sent_s + (NEWS_PERIOD_S if has_news else HEARTBEAT_S)

    def take(self) -> WorkerMessage:
        """Return everything that has not been sent as one message."""
        load = self._load if self._taken or self._load != self._sent_load else None
        message = WorkerMessage(
            events=tuple(self._events),
            kv=self._changes.take(),
            load=load,
            taken=tuple(self._taken),
            identity=self._identity,
        )
        self._events, self._taken, self._identity = [], [], None
        self._sent_load, self._sent_s = self._load, self._clock()
        return message

    async def receive(self) -> WorkerMessage | None:
        """Wait until a message is due and return it; None when the outbox is closed, or its router is silent."""
        while not self._is_closed:
            due_s, now_s = self.due_s(), self._clock()
            if now_s >= self._heard_s + SILENT_ROUTER_S:
                return None
            if due_s <= now_s:
                return self.take()
            self._changed.clear()
            self._looks_again_s = due_s
            timer = None
            if due_s < math.inf:
                timer = asyncio.get_running_loop().call_later(due_s - now_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                self._looks_again_s = math.inf
                if timer is not None:
                    timer.cancel()
        return None


def is_news(sent: WorkerLoad, load: WorkerLoad) -> bool:
    """Return whether `load` differs so much from `sent` that routers may decide differently."""
    sent_requests, requests = sent.num_running + sent.num_waiting, load.num_running + load.num_waiting
    return (
        bool(sent_requests) != bool(requests)
        or abs(requests - sent_requests) > max(1, REQUESTS_SHARE * sent_requests)
        or abs(load.waiting_tokens - sent.waiting_tokens) > max(TOKENS, TOKENS_SHARE * sent.waiting_tokens)
        or abs(load.used_share**8 - sent.used_share**8) > PRESSURE
        or load.max_num_seqs != sent.max_num_seqs
        or _differ(load.prefill_tokens_per_s, sent.prefill_tokens_per_s)
        or _differ(load.decode_step_s, sent.decode_step_s)
        or any(_has_changed(speed, sent.fetch_speeds.get(place)) for place, speed in load.fetch_speeds.items())
    )


def _has_changed(speed: FetchSpeed, sent: FetchSpeed | None) -> bool:
    return sent is None or any(map(_differ, speed, sent))


def _differ(rate: float, other: float) -> bool:
    return max(rate, other) > RATES_FACTOR * min(rate, other)
