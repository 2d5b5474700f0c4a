"""A router's connection to one worker: the worker's event stream, kept open, and the attempts that the worker has.

- **event stream**: the worker's messages to this router, one per engine step: output events, changes of the prefix index, and the
  load.
- **attempt**: one try to compute a request at this worker (`in_flight_requests`).

When the stream breaks, the connection hands all its attempts over to its listener as lost. Then it opens the stream again, with
pauses that double (`RouterTimings`), until the connection is closed:

    closed --open_stream--> open --the stream breaks--> closed --pause--> ...
    open or closed --drain--> draining --close--> removed by the worker pool
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar

from transom_cluster.openai.request.prompt_limits import ModelLimits
from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.failover import Cause
from transom_cluster.router.in_flight_requests import InFlightRequest, InFlightRequests, OutputListener
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_core.contract import ErrorInfo, Request, WorkerInfo, WorkerLoad, WorkerMessage
from transom_core.errors import WorkerLost

logger = logging.getLogger("transom.router")

T = TypeVar("T")
Attempts = Sequence[tuple[InFlightRequest, Request]]


class ConnectionBroken(Exception):
    """The stream broke during a call to the worker; the listener has the attempts."""


class CallFailed(Exception):
    """A call to the worker failed, and the stream is still open."""


class ConnectionListener(OutputListener, Protocol):
    """Learns what happens on worker connections."""

    def opened(self, connection: WorkerConnection) -> None:
        """The connection takes requests from now on."""

    def received(self, connection: WorkerConnection, message: WorkerMessage) -> None:
        """The worker's message has updates of its prefix index or its load."""

    def closed(self, connection: WorkerConnection) -> None:
        """The stream has ended. A call of `lost` comes next."""

    def lost(
        self, connection: WorkerConnection, requests: list[InFlightRequest], cause: Cause, reason: Exception | None
    ) -> None:
        """These requests cannot continue at this worker; `reason` is what the worker or its stream said, if anything."""

    def failed(self, request: InFlightRequest, error: Exception) -> None:
        """Handling the request raised an error: it has to end, if it has not ended yet."""


class WorkerConnection:
    """Keeps one worker's event stream open, submits attempts and receives their events. Runs on one event loop.

    `suspect` and `cooldown_until_s` belong to the request queue, which decides what the worker gets.
    """

    def __init__(
        self,
        worker_id: str,
        client: WorkerClient,
        router_id: str,
        listener: ConnectionListener,
        timings: RouterTimings,
    ) -> None:
        self.worker_id = worker_id
        self.client = client
        self.in_flight = InFlightRequests(listener)
        self.suspect: InFlightRequest | None = None  # the one suspect (`failover`) that the worker has
        self.cooldown_until_s = (
            0.0  # on the monotonic clock: until then the worker gets requests only if no other one can
        )
        self.info: WorkerInfo | None = None  # as of the last time that the stream was opened
        self.load: WorkerLoad | None = None  # as the worker reported it last
        self.is_open = False
        self.is_draining = False
        self.is_closing = False  # the router itself ends the stream
        self._router_id = router_id
        self._listener = listener
        self._timings = timings
        self._tasks = BackgroundTasks()
        self._calls: set[asyncio.Task[Any]] = set()  # cancelled when the stream breaks
        self._submitting: set[str] = set()  # request ids of attempts in a submission that runs
        self._withdrawn: set[str] = set()  # those of them that are aborted once the submission has ended
        self._stream_ended = asyncio.Event()  # of the present stream

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be sent here."""
        return self.is_open and not self.is_draining

    @property
    def state(self) -> Literal["open", "closed", "draining"]:
        """The connection's state, for metrics and the list of workers."""
        return "draining" if self.is_draining else "open" if self.is_open else "closed"

    @property
    def limits(self) -> ModelLimits | None:
        """The limits of the worker's model; None before the first time that the stream is open."""
        if self.info is None:
            return None
        return ModelLimits(
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            block_size=self.info.cache.block_size,
            kv_policy_obstacle=self.info.kv_policy_obstacle,
        )

    def start(self) -> None:
        """Open the stream, and open it again whenever it breaks."""
        self._tasks.spawn(self._keep_open())

    async def close(self, *, is_lost: bool = False) -> None:
        """End the stream for good. `is_lost`: the worker is gone, so that its end is a loss and no drain."""
        self.is_draining, self.is_closing = True, not is_lost
        await self._tasks.cancel()

    async def drain(self, drain_s: float) -> int:
        """Take no new attempts, and give running ones `drain_s` to end; hand over the others, and return their number."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self.in_flight.wait_until_empty()
        requests = self.in_flight.take_all()
        if requests:
            request_ids = [request.attempt.request_id for request in requests]
            self._withdrawn |= self._submitting.intersection(request_ids)
            self._hand_over(requests, "moved")
            await self._send_abort(request_ids)
        return len(requests)

    async def submit(self, attempts: Attempts) -> list[ErrorInfo | None]:
        """Submit attempts that are in `in_flight`. The worker accepts all or none; returns an entry for each as
        `WorkerClient.submit` does.

        A worker must answer a call before it gets a migrated attempt. Otherwise, where two workers die together, the second loss
        would count against a request that was sent from the first to the second.

        Raises:
            ConnectionBroken: the stream broke; the listener's `lost` has the attempts.
        """
        request_ids = {attempt.request_id for _, attempt in attempts}
        self._submitting |= request_ids
        try:
            if any(request.record.num_migrations for request, _ in attempts):
                await self._call(self.client.info())
            for request, attempt in attempts:
                if request.attempt is attempt:  # the request may have migrated meanwhile
                    request.send()
            return await self._call(self.client.submit(self._router_id, [attempt for _, attempt in attempts]))
        except CallFailed:
            self._abort(list(request_ids))  # the worker may have accepted them
            return [ErrorInfo.of(WorkerLost("The worker did not answer."))] * len(attempts)
        finally:
            self._submitting -= request_ids
            if withdrawn := self._withdrawn & request_ids:
                self._withdrawn -= withdrawn
                self._abort(list(withdrawn))

    def withdraw(self, requests: Sequence[InFlightRequest]) -> None:
        """Abort attempts, those of a running submission after the submission has ended; returns at once."""
        request_ids = [request.attempt.request_id for request in requests]
        known = {one for one in request_ids if self.in_flight.remove(one) is not None}
        self._withdrawn |= known & self._submitting
        if now := [one for one in request_ids if one in known - self._submitting]:
            self._abort(now)

    def resync(self) -> None:
        """Ask the worker for its whole prefix index again; returns at once."""
        self._tasks.spawn(self._ask_resync())

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for the result of a call to the worker.

        Raises:
            ConnectionBroken: the stream broke during the call, or within `submit_grace_s` after the call had failed.
            CallFailed: the call failed, and the stream is still open.
        """
        stream_ended = self._stream_ended
        task = self._tasks.spawn(call)
        self._calls.add(task)
        try:
            await asyncio.wait((task,))
        finally:
            self._calls.discard(task)
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

    async def _keep_open(self) -> None:
        pause_s = self._timings.first_reconnect_pause_s
        lost: list[str] = []
        while not self.is_draining:
            error: Exception | None = None
            try:
                await self._read(lost)
            except Exception as caught:
                error = caught
            finally:
                was_open = self.is_open
                lost = [*([] if was_open else lost), *self._lose(error)]
            if was_open:
                logger.warning(
                    "The event stream of worker %s broke (%d requests): %r", self.worker_id, len(lost), error
                )
                pause_s = self._timings.first_reconnect_pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timings.longest_reconnect_pause_s)

    async def _read(self, lost: list[str]) -> None:
        """Open the stream and read it until it ends. The worker may still compute the attempts `lost`, which are aborted first.

        Raises:
            TimeoutError: the worker has sent nothing for about `silence_s`, not even a heartbeat.
        """
        loop = asyncio.get_running_loop()
        async with (
            contextlib.aclosing(self.client.open_stream(self._router_id)) as stream,
            asyncio.timeout(None) as limit,
        ):
            async for message in stream:
                # A new timer seldom, since messages are many.
                limit_s, until_s = limit.when(), loop.time() + self._timings.silence_s
                if limit_s is None or until_s - limit_s > self._timings.silence_s / 8:
                    limit.reschedule(until_s)
                if not self.is_open:
                    await self._open(lost)
                self._receive(message)

    async def _open(self, lost: list[str]) -> None:
        self.info = await self.client.info()
        if lost:
            await self.client.abort(self._router_id, lost)
        self._stream_ended = asyncio.Event()
        self.is_open = True
        self._listener.opened(self)

    def _receive(self, message: WorkerMessage) -> None:
        if message.load is not None:
            self.load = message.load
        if message.kv is not None or message.load is not None:
            self._listener.received(self, message)
        undelivered = self.in_flight.dispatch(message.events)
        if torn := undelivered.torn:
            logger.warning("Output of %d requests from worker %s is missing.", len(torn), self.worker_id)
            self._abort([request.attempt.request_id for request in torn])
            self._hand_over(torn, "torn")
        if undelivered.lost:
            self._hand_over(undelivered.lost, "lost", undelivered.reason)
        for request, error in undelivered.failed:
            self._fail(request, error)
            self._abort([request.attempt.request_id])

    def _lose(self, error: Exception | None) -> list[str]:
        """The stream has ended, with `error` if it broke: hand its attempts over, and return their request ids."""
        for call in list(self._calls):
            call.cancel()
        self._stream_ended.set()
        requests = self.in_flight.take_all()
        request_ids = [request.attempt.request_id for request in requests]
        if self.is_open:
            self.is_open = False
            try:
                self._listener.closed(self)
            except Exception as bug:  # the attempts are handed over all the same
                logger.error("Handling the loss of worker %s failed.\n%s", self.worker_id, _stack(bug))
            self._hand_over(requests, "lost", error)
        return request_ids

    def _hand_over(self, requests: list[InFlightRequest], cause: Cause, reason: Exception | None = None) -> None:
        """Hand requests over that cannot continue here. Should that fail, which would be a bug, they end, so that none waits for
        ever."""
        try:
            self._listener.lost(self, requests, cause, reason)
        except Exception as error:
            for request in requests:
                if not request.has_ended and request.worker_id in (None, self.worker_id):
                    self._fail(request, error)

    def _fail(self, request: InFlightRequest, error: Exception) -> None:
        """End a request whose handling raised an error, which would be a bug; other requests continue."""
        request_id = request.original.request_id
        logger.error(
            "Request %s failed in the router.\n%s", request_id, _stack(error), extra={"request_id": request_id}
        )
        self._listener.failed(request, error)

    def _abort(self, request_ids: list[str]) -> None:
        if self.is_open:
            self._tasks.spawn(self._send_abort(request_ids))

    async def _send_abort(self, request_ids: list[str]) -> None:
        try:
            await self.client.abort(self._router_id, request_ids)
        except Exception as error:  # a lost worker computes nothing more
            logger.info("Worker %s did not get an abort: %r", self.worker_id, error)

    async def _ask_resync(self) -> None:
        """Ask until the worker has replied or its stream ends, since the index mirror reports a gap only once."""
        stream_ended, pause_s = self._stream_ended, self._timings.first_reconnect_pause_s
        while not stream_ended.is_set():
            try:
                await self.client.resync(self._router_id)
                return
            except Exception as error:
                logger.info("Worker %s did not get the request for its prefix index: %r", self.worker_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timings.longest_reconnect_pause_s)


def _stack(error: Exception) -> str:
    return "".join(traceback_lines(error, with_messages=False))
