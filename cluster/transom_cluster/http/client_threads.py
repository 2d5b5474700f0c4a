"""Runs the long work of requests on a few threads, away from the event loop that carries every client's stream.

Clients take turns by the time that their work took, divided by their weights (`client_queue`). So a client that sends many long
bodies delays itself, but delays each other client by one piece of work at most. Short work has separate threads and never waits for
long work.

There are few threads, because they share the GIL with the event loop: with N busy threads, the loop waits for up to N turns.
After long work the process returns the memory that the work has freed, which malloc would keep.

Example: with one thread, client A sends two texts of a second each, and then B sends 20 chats of 0.1 s each. The order is one text,
ten of B's chats, the other text, and the rest of B's chats.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from starlette.types import Receive

from transom_cluster.http.client_disconnect import until_disconnect
from transom_core.client_queue import ClientQueue, Sharer
from transom_core.machine.host_memory import keep_little_freed_memory, return_freed_memory

MAX_SHORT_CHARS = 100_000  # work on more characters than this counts as long
# There are fewer threads for long work than chat template processes, so that a short chat finds a free process.
NUM_SHORT_THREADS, NUM_LONG_THREADS = 2, 1
# These threads only wait: a child process checks a grammar, and a check may take seconds.
NUM_CHECK_THREADS = 2
THREAD_NAME = "transom-bodies"

Result = TypeVar("Result")
Found = TypeVar("Found", covariant=True)


class GrammarCheck(Protocol[Found]):
    """A grammar check in a child process; patient ones have a child of their own (`GrammarChecker`)."""

    def __call__(self, *, is_patient: bool) -> Found:
        """Check the grammar."""


class FairThreads:
    """A few threads that serve clients in turns by the time that each has used. All calls come from one event loop. `after` is
    called on the thread when a client's work has ended, and is part of that work. `clock` gives seconds, on any thread."""

    def __init__(
        self,
        num_threads: int,
        *,
        after: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_free = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=THREAD_NAME)
        self._waiting: ClientQueue[asyncio.Future[None]] = ClientQueue()
        self._after, self._clock = after, clock

    async def run(self, sharer: Sharer, function: Callable[[], Result]) -> Result:
        """Call `function` on a thread when it is the client's turn, and return its result.

        Work that is cancelled while it waits never runs. Work that has begun runs to its end.
        """
        loop = asyncio.get_running_loop()
        await self._turn(loop, sharer.client)
        seconds = 0.0

        def timed() -> Result:
            nonlocal seconds
            begin_s = self._clock()
            try:
                return function()
            finally:
                self._after()
                seconds = self._clock() - begin_s

        def end(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, sharer.client, seconds / sharer.weight)

        work = self._threads.submit(timed)
        work.add_done_callback(end)
        return await asyncio.wrap_future(work)

    async def _turn(self, loop: asyncio.AbstractEventLoop, client: str) -> None:
        """Wait for a thread."""
        turn = loop.create_future()
        self._waiting.add(client, turn)
        self._give_threads()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove(client, turn)
            if turn.done() and not turn.cancelled():  # it had been given a thread already
                self._end(client, 0.0)
            raise

    def _end(self, client: str, cost: float) -> None:
        """Charge a client for its work, and give its thread to the next one."""
        self._waiting.charge(client, cost)
        self._num_free += 1
        self._give_threads()

    def _give_threads(self) -> None:
        """Give free threads to the clients whose turn it is."""
        while self._num_free and (turn := self._waiting.take()) is not None:
            if not turn.done():
                turn.set_result(None)
                self._num_free -= 1


class RequestThreads:
    """The threads of one router for its requests: some for short work, some for long work, and some for grammar checks.

    Without the calls about memory, malloc keeps 130 MiB after a text of 2 MB has become tokens."""

    def __init__(self) -> None:
        keep_little_freed_memory()
        self.short, self.long = FairThreads(NUM_SHORT_THREADS), FairThreads(NUM_LONG_THREADS, after=return_freed_memory)
        self.checks, self.patient_checks = FairThreads(NUM_CHECK_THREADS), FairThreads(1)


class ClientThreads:
    """Runs the work of one HTTP request on the router's threads. When the client disconnects (`receive` says so), ClientDisconnect
    is raised, the request's work is cancelled, and work that waits for its turn never runs."""

    def __init__(self, threads: RequestThreads, sharer: Sharer, receive: Receive) -> None:
        self._threads, self.sharer, self._receive = threads, sharer, receive

    async def run(self, function: Callable[[], Result], *, num_chars: int, inline_chars: int = 0) -> Result:
        """Call `function` on a thread and return its result. `num_chars` says how much work it is, in characters of text. With at
        most `inline_chars` it is called at once, on the event loop."""
        if num_chars <= inline_chars:
            return function()
        threads = self._threads.short if num_chars <= MAX_SHORT_CHARS else self._threads.long
        return await until_disconnect(threads.run(self.sharer, function), self._receive)

    async def check(self, function: GrammarCheck[Result], *, is_patient: Callable[[], bool]) -> Result:
        """Call `function`, which waits for a grammar check, on a thread that only checks use; patient ones have another.

        `is_patient` says whether the client's next check is patient. It is asked when the client's turn comes, because the checks
        before it may have made the client patient; the check then waits for a turn on the other thread.
        """
        if not is_patient():
            found = await until_disconnect(
                self._threads.checks.run(self.sharer, lambda: None if is_patient() else (function(is_patient=False),)),
                self._receive,
            )
            if found is not None:
                return found[0]
        patient_check = functools.partial(function, is_patient=True)
        return await until_disconnect(self._threads.patient_checks.run(self.sharer, patient_check), self._receive)
