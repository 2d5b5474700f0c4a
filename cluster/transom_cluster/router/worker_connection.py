"""`WorkerConnection`: a router's connection to one worker, with the worker's event stream and the attempts that the worker has.

- **event stream**: the worker's messages to this router, one per engine step: output events, changes of the prefix index, and the
  load.
- **attempt**: one try to compute a request at this worker (`in_flight_requests`).

The methods `read` and `lose` return what happens on the stream as values (`Opened`, `Received`, `Lost`). The connection itself
calls no code of its users; `worker_events` keeps a connection open in this way:

    until it drains:
        for each event of read(): handle it
        handle lose()                   # all attempts of the stream that has ended
        pause

The property `state` says whether a connection is closed, open, or draining.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from transom_cluster.openai.request.request_limits import ModelLimits
from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.failover import Cause
from transom_cluster.router.in_flight_requests import AttemptState, InFlightRequest, InFlightRequests
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_client import WorkerClient
from transom_core.contract import ErrorInfo, Request, WorkerInfo, WorkerLoad, WorkerMessage
from transom_core.errors import WorkerLost

logger = logging.getLogger("transom.router")

T = TypeVar("T")
Attempts = Sequence[tuple[InFlightRequest, Request]]

DRAIN_LOOK_S = 1.0  # how often the drain of a model's last worker checks whether another worker has come


class ConnectionBroken(Exception):
    """The stream broke during a call to the worker; `WorkerConnection.lose` returns the attempts."""


class CallFailed(Exception):
    """A call to the worker failed, and the stream is still open."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The stream is open, so the worker takes requests from now on; `WorkerConnection.info` is up to date. Not `is_new`: it was
    open before, and the worker's weights were replaced."""

    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Received:
    """A message from the worker."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Lost:
    """These requests cannot continue at the worker.

    `reason` is the error of the worker or of its stream, if there is one. With `is_closed` the stream has ended.
    """

    requests: Sequence[InFlightRequest]
    cause: Cause
    reason: Exception | None = None
    is_closed: bool = False


class WorkerConnection:
    """Keeps one worker's event stream open, submits attempts and receives their events. Runs on one event loop.

    The request queue, which decides what the worker gets, owns `suspect` and `cooldown_until_s`. `tokenizer` is the digest of the
    router's tokenizer; empty if workers with any tokenizer are accepted.
    """

    def __init__(
        self, worker_id: str, client: WorkerClient, router_id: str, timings: RouterTimings, *, tokenizer: str = ""
    ) -> None:
        self.worker_id = worker_id
        self.client = client
        self.in_flight = InFlightRequests()
        self.suspect: InFlightRequest | None = None  # the one suspect (`failover`) that the worker has
        # Until this time on the monotonic clock, the worker gets requests only if no other worker can.
        self.cooldown_until_s = 0.0
        self.info: WorkerInfo | None = None  # as of the last time that the stream was opened
        self.load: WorkerLoad | None = None  # as the worker reported it last
        self.is_open = False
        self.is_draining = False
        self.is_closing = False  # the router itself is about to end the stream
        self._router_id, self._tokenizer = router_id, tokenizer
        self._timings = timings
        self._tasks = BackgroundTasks()
        self._calls: set[asyncio.Task[Any]] = set()  # cancelled when the stream breaks
        self._submitting: set[str] = set()  # request ids of attempts in a submission that runs
        self._withdrawn: set[str] = set()  # attempts in `_submitting` that are aborted once the submission has ended
        self._stream_ended = asyncio.Event()  # set when the present stream has ended
        self._orphans: list[str] = []  # request ids of lost attempts that the worker may still compute

    @property
    def takes_requests(self) -> bool:
        """Return whether new requests may be sent here."""
        return self.is_open and not self.is_draining and self.speaks_our_tokens

    @property
    def speaks_our_tokens(self) -> bool:
        """Return whether the worker has the router's tokenizer. While one model replaces another, it may have a different one."""
        theirs = "" if self.info is None else self.info.tokenizer
        return not theirs or not self._tokenizer or theirs == self._tokenizer

    @property
    def identity(self) -> str:
        """Return the identity of the worker's model; empty if it is not known."""
        return "" if self.info is None else self.info.identity

    @property
    def loaded_at_s(self) -> float:
        """Return the time at which the worker began to load its model; 0 if that is not known."""
        return 0.0 if self.info is None else self.info.loaded_at_s

    @property
    def replaced(self) -> tuple[str, ...]:
        """Return the identities of the weights that the worker had before; none if that is not known."""
        return () if self.info is None else tuple(old for old in self.info.replaced if old != self.identity)

    @property
    def max_num_seqs(self) -> int:
        """Return how many requests the worker runs at once; 1 until it has reported its load."""
        return 1 if self.load is None else self.load.max_num_seqs

    @property
    def num_requests(self) -> int:
        """Return how many requests the worker has: by its last report, which counts all routers', or this router's if more."""
        reported = 0 if self.load is None else self.load.num_running + self.load.num_waiting
        return max(reported, len(self.in_flight))

    @property
    def state(self) -> Literal["open", "closed", "draining"]:
        """Return the connection's state, for metrics and the list of workers."""
        return "draining" if self.is_draining else "open" if self.is_open else "closed"

    @property
    def limits(self) -> ModelLimits | None:
        """Return the limits of the worker's model; None until the stream has been opened once."""
        if self.info is None:
            return None
        return ModelLimits(
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            block_size=self.info.cache.block_size,
            caches_prefixes=self.info.cache.enable_prefix_caching,
            kv_policy_obstacle=self.info.kv_policy_obstacle,
            hidden_size=self.info.hidden_size,
        )

    async def close(self) -> None:
        """Cancel the connection's tasks. Nothing may read the connection any more."""
        await self._tasks.cancel()

    async def drain(self, *, has_another: Callable[[], bool]) -> Lost:
        """Take no new attempts, give running ones `drain_s` to end, and return the rest, which must migrate.

        While `has_another` returns False, no other worker could continue them, so they may stay for up to `last_drain_s`.
        """
        self.is_draining = True
        begin_s = asyncio.get_running_loop().time()
        for limit_s in (self._timings.drain_s, *self._further_drains_s()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(begin_s + limit_s):
                    await self.in_flight.wait_until_empty()
            if not len(self.in_flight) or has_another():
                break
        requests = self.in_flight.take_all()
        self._withdrawn |= self._submitting.intersection(request.attempt.request_id for request in requests)
        return Lost(requests, "moved")

    async def submit(self, attempts: Attempts) -> list[ErrorInfo | None]:
        """Submit attempts that are in `in_flight`. The worker accepts all or none; return one entry per attempt, as
        `WorkerClient.submit` does.

        A worker must answer a call before it gets a migrated attempt. Otherwise, if two workers die at the same time, the second
        loss would count against a request that was just sent from the first worker to the second.

        Raises:
            ConnectionBroken: the stream broke; `lose` returns the attempts.
        """
        request_ids = {attempt.request_id for _, attempt in attempts}
        self._submitting |= request_ids
        try:
            if any(request.record.num_migrations for request, _ in attempts):
                await self._call(self.client.info())
            for request, attempt in attempts:
                # The request may have ended or migrated meanwhile.
                if request.attempt is attempt and request.state is AttemptState.PLACED:
                    request.send()
            return await self._call(self.client.submit(self._router_id, [attempt for _, attempt in attempts]))
        except CallFailed:
            self.abort_soon(list(request_ids))  # the worker may have accepted them
            return [ErrorInfo.of(WorkerLost("The worker did not answer."))] * len(attempts)
        finally:
            self._submitting -= request_ids
            if withdrawn := self._withdrawn & request_ids:
                self._withdrawn -= withdrawn
                self.abort_soon(list(withdrawn))

    def _further_drains_s(self) -> Iterator[float]:
        """Yield the times, in seconds since the drain began, at which to check again whether another worker has come."""
        limit_s = self._timings.drain_s
        while limit_s < self._timings.last_drain_s:
            limit_s = min(limit_s + DRAIN_LOOK_S, self._timings.last_drain_s)
            yield limit_s

    def withdraw(self, requests: Sequence[InFlightRequest]) -> None:
        """Abort attempts without waiting for the worker. Those of a running submission are aborted again after it has ended, since
        the first abort may have overtaken it. It is sent at once all the same: at the worker a submission may wait for its turn."""
        request_ids = [request.attempt.request_id for request in requests]
        known = [one for one in request_ids if self.in_flight.remove(one) is not None]
        self._withdrawn |= self._submitting.intersection(known)
        if known:
            self.abort_soon(known)

    def resync(self) -> None:
        """Ask the worker for its whole prefix index again, without waiting for the answer."""
        self._tasks.spawn(self._ask_resync())

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for the result of a call to the worker.

        Raises:
            ConnectionBroken: the stream broke during the call, or within `submit_grace_s` after the call had failed.
            CallFailed: the call failed, or has not answered within `call_timeout_s`, and the stream is still open.
        """
        stream_ended = self._stream_ended
        task = self._tasks.spawn(call)
        self._calls.add(task)
        try:
            answered, _ = await asyncio.wait((task,), timeout=self._timings.call_timeout_s)
        finally:
            self._calls.discard(task)
        if not answered:
            task.cancel()
            raise CallFailed
        if task.cancelled():
            raise ConnectionBroken
        if (error := task.exception()) is None:
            return task.result()
        logger.warning("A call to worker %s failed: %r", self.worker_id, error)
        try:
            await asyncio.wait_for(stream_ended.wait(), self._timings.submit_grace_s)
        except TimeoutError:
            raise CallFailed from error
        raise ConnectionBroken

    async def read(self) -> AsyncGenerator[Opened | Received, None]:
        """Open the stream, and yield that it is open and then its messages until it ends.

        The worker may still compute attempts that were lost with the previous stream; they are aborted first.

        Raises:
            TimeoutError: the worker has sent nothing for about `silence_s`, not even a heartbeat.
        """
        loop = asyncio.get_running_loop()
        shown_s = loop.time()
        async with (
            contextlib.aclosing(self.client.open_stream(self._router_id)) as stream,
            asyncio.timeout(None) as limit,
        ):
            async for message in stream:
                # Messages are frequent, so the timer is moved only once it is off by an eighth of its time.
                limit_s, until_s = limit.when(), loop.time() + self._timings.silence_s
                if limit_s is None or until_s - limit_s > self._timings.silence_s / 8:
                    limit.reschedule(until_s)
                if not self.is_open:
                    await self._open()
                    yield Opened()
                elif message.identity is not None:  # its weights were replaced
                    self.info = await self.client.info()
                    for request in self.in_flight.requests:
                        request.weights_replaced(self.identity)
                    yield Opened(is_new=False)
                if loop.time() >= shown_s + self._timings.presence_s:  # a heartbeat comes every 5 s
                    shown_s = loop.time()
                    self.abort_soon([])
                if message.load is not None:
                    self.load = message.load
                yield Received(message)

    def lose(self, error: Exception | None) -> Lost | None:
        """Handle the stream's end, with `error` if it broke. Return the requests that are lost; None if the stream was not open."""
        for call in list(self._calls):
            call.cancel()
        self._stream_ended.set()
        requests = self.in_flight.take_all()
        request_ids = [request.attempt.request_id for request in requests]
        if not self.is_open:
            self._orphans += request_ids
            return None
        self.is_open, self._orphans = False, request_ids
        return Lost(requests, "lost", error, is_closed=True)

    async def _open(self) -> None:
        self.info = await self.client.info()
        if self._orphans:
            await self.client.abort(self._router_id, self._orphans)
        self._stream_ended = asyncio.Event()
        self.is_open = True

    def abort_soon(self, request_ids: list[str]) -> None:
        """Have the worker abort attempts if the stream is open, without waiting for the worker."""
        if self.is_open:
            self._tasks.spawn(self.abort(request_ids))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Have the worker abort attempts, if it can be reached."""
        try:
            await self.client.abort(self._router_id, list(request_ids))
        except Exception as error:  # a lost worker computes nothing more
            logger.info("Worker %s did not get an abort: %r", self.worker_id, error)

    async def _ask_resync(self) -> None:
        """Ask until the worker has replied or its stream has ended, since the index mirror reports a gap only once."""
        stream_ended, pause_s = self._stream_ended, self._timings.first_reconnect_pause_s
        while not stream_ended.is_set():
            try:
                await self.client.resync(self._router_id)
                return
            except Exception as error:
                logger.info("Worker %s did not get the request for its prefix index: %r", self.worker_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timings.longest_reconnect_pause_s)
