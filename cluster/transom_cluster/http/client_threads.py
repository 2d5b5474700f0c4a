"""Runs the long work of requests on a few threads, away from the event loop that carries every client's stream.

Clients take turns: while a client's work waits, no other client gets two turns. So a client that sends many long bodies delays
itself, but delays each other client by one piece of work at most. Short work has separate threads and never waits for long work.

There are few threads, because they share the GIL with the event loop: with N busy threads, the loop waits for up to N turns.

Example: with one thread, client A sends work 1, 2 and 3, and then B sends 4. The order is 1, 2, 4, 3: when B came, 2 had A's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from transom_cluster.http.client_disconnect import until_disconnect

MAX_SHORT_CHARS = 100_000  # work on more characters than this counts as long
# There are fewer threads for long work than chat template processes, so that a short chat finds a free process.
NUM_SHORT_THREADS, NUM_LONG_THREADS = 2, 1
# These threads only wait: a child process checks a grammar, and a check may take seconds.
NUM_CHECK_THREADS = 2
THREAD_NAME = "transom-bodies"

Result = TypeVar("Result")


class FairThreads:
    """A few threads that serve clients in turns. All calls come from one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._num_free = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=THREAD_NAME)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client first

    async def run(self, client: str, function: Callable[[], Result]) -> Result:
        """Call `function` on a thread when it is the client's turn, and return its result.

        Work that is cancelled while it waits never runs. Work that has begun runs to its end.
        """
        loop = asyncio.get_running_loop()
        await self._turn(loop, client)
        work = self._threads.submit(function)

        def give_back(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._give_back)

        work.add_done_callback(give_back)
        return await asyncio.wrap_future(work)

    async def _turn(self, loop: asyncio.AbstractEventLoop, client: str) -> None:
        """Take a free thread, or wait for one."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had been given a thread already
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Give a thread that has become free to the next waiting client."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # after all other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class RequestThreads:
    """The threads of one router for its requests: some for short work, some for long work, and some for grammar checks."""

    def __init__(self) -> None:
        self.short, self.long = FairThreads(NUM_SHORT_THREADS), FairThreads(NUM_LONG_THREADS)
        self.checks, self.patient_checks = FairThreads(NUM_CHECK_THREADS), FairThreads(1)


class ClientThreads:
    """Runs the work of one HTTP request on the router's threads. When the client disconnects (`receive` says so), ClientDisconnect
    is raised, the request's work is cancelled, and work that waits for its turn never runs."""

    def __init__(self, threads: RequestThreads, client: str, receive: Receive) -> None:
        self._threads, self.client, self._receive = threads, client, receive

    async def run(self, function: Callable[[], Result], *, num_chars: int, inline_chars: int = 0) -> Result:
        """Call `function` on a thread and return its result. `num_chars` says how much work it is, in characters of text. With at
        most `inline_chars` it is called at once, on the event loop."""
        if num_chars <= inline_chars:
            return function()
        threads = self._threads.short if num_chars <= MAX_SHORT_CHARS else self._threads.long
        return await until_disconnect(threads.run(self.client, function), self._receive)

    async def check(self, function: Callable[[], Result], *, is_patient: bool) -> Result:
        """Call `function`, which waits for a grammar check, on a thread that only checks use; patient ones have another."""
        threads = self._threads.patient_checks if is_patient else self._threads.checks
        return await until_disconnect(threads.run(self.client, function), self._receive)
