"""`RouterOutbox`: what a worker has not sent to one router yet, and when the next message is due.

A message costs a router 0.3 to 0.9 ms of CPU time, even if it carries little (docs/routing.md), and 200 workers send to each
router. So

- **events** of requests are due at once, and their message carries all news;
- **news** (changes of the prefix index, a load that routers would judge differently) without events is due at once after
  silence, else `NEWS_PERIOD_S` after the last message;
- **a heartbeat**, a message with what has changed however little, is due `HEARTBEAT_S` after the last message, so that a router
  notices a worker that has become silent.

For example, with steps of 20 ms: a router whose requests run here learns of everything within a step; a router without requests
here gets one message a second while others keep the worker busy, and one in five seconds from an idle worker.

What waits is joined: a router that reads slowly gets fewer, larger messages, in which changes of the index that cancel out are
left out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from transom_core.contract import OutputEvent, WorkerLoad, WorkerMessage
from transom_worker.kvcache.prefix.pending_changes import PendingChanges

NEWS_PERIOD_S = 1.0
HEARTBEAT_S = 5.0

# A load is news when it differs from the last one that was sent by more than this.
REQUESTS_SHARE = 1 / 16  # of running and waiting requests, and more than one request
TOKENS = 256  # that wait to be computed; a running request counts as 200 (`routing.policy`)
TOKENS_SHARE = 1 / 8
PRESSURE = 0.02  # of an answer's time that a request may wait for blocks: `used_share ** 8`
RATES_FACTOR = 1.25


class RouterOutbox:
    """Collects what one router has to learn. All methods run on one event loop; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events: list[OutputEvent] = []
        self._changes = PendingChanges()
        self._load = WorkerLoad()
        self._taken: list[str] = []
        self._sent_load: WorkerLoad | None = None
        self._sent_s = -math.inf
        self._is_closed = False
        self._looks_again_s = math.inf  # when `receive`, where it waits, looks again by itself
        self._changed = asyncio.Event()

    def put(self, message: WorkerMessage) -> None:
        """Add what a step has brought: the events of this router's requests, changes of the index, load."""
        self._events += message.events
        self._taken += message.taken
        if message.kv is not None:
            self._changes.add(message.kv)
        if message.load is not None:
            self._load = message.load
        if self.due_s() < self._looks_again_s:
            self._changed.set()

    def close(self) -> None:
        """End the stream; what has not been sent is lost."""
        self._is_closed = True
        self._changed.set()

    def due_s(self) -> float:
        """When the next message is due, on the clock; not before the whole index is there."""
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
            events=tuple(self._events), kv=self._changes.take(), load=load, taken=tuple(self._taken)
        )
        self._events, self._taken = [], []
        self._sent_load, self._sent_s = self._load, self._clock()
        return message

    async def receive(self) -> WorkerMessage | None:
        """Wait until a message is due and return it; None when the outbox is closed."""
        while not self._is_closed:
            due_s, now_s = self.due_s(), self._clock()
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
    """Whether routers would judge a worker differently if they knew `load` instead of `sent`."""
    sent_requests, requests = sent.num_running + sent.num_waiting, load.num_running + load.num_waiting
    return (
        bool(sent_requests) != bool(requests)
        or abs(requests - sent_requests) > max(1, REQUESTS_SHARE * sent_requests)
        or abs(load.waiting_tokens - sent.waiting_tokens) > max(TOKENS, TOKENS_SHARE * sent.waiting_tokens)
        or abs(load.used_share**8 - sent.used_share**8) > PRESSURE
        or load.max_num_seqs != sent.max_num_seqs
        or _differ(load.prefill_tokens_per_s, sent.prefill_tokens_per_s)
        or _differ(load.decode_step_s, sent.decode_step_s)
        or _differ(load.fetch_bytes_per_s, sent.fetch_bytes_per_s)
    )


def _differ(rate: float, other: float) -> bool:
    return max(rate, other) > RATES_FACTOR * min(rate, other)
