"""One worker's connection: its long event stream, kept open, and the attempts that live on it.

When the stream breaks, everything on it is handed over as lost, and the stream is opened again, with growing pauses, until the
connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar

from transom_cluster.openai.to_contract import ModelLimits
from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.failover import Cause
from transom_cluster.router.in_flight_requests import InFlightRequest, InFlightRequests, OutputListener
from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_worker.contract import ErrorInfo, Request, WorkerInfo, WorkerLoad, WorkerMessage
from transom_worker.errors import WorkerLost

logger = logging.getLogger("transom.router")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
SUBMIT_GRACE_S = 0.5  # a submission that fails is mostly the first sign of a stream that breaks

T = TypeVar("T")
Attempts = Sequence[tuple[InFlightRequest, Request]]


class ConnectionBroken(Exception):
    """The stream broke while a worker was asked; what was on it has been handed over as lost."""


class CallFailed(Exception):
    """A call to a worker failed."""


class ConnectionListener(OutputListener, Protocol):
    """Who is told what happens on a connection."""

    def opened(self, connection: WorkerConnection) -> None:
        """The connection takes requests from now on."""

    def told(self, connection: WorkerConnection, message: WorkerMessage) -> None:
        """The worker says what changed of its index and load."""

    def closed(self, connection: WorkerConnection) -> None:
        """The stream has ended. `lost` follows."""

    def lost(self, connection: WorkerConnection, requests: list[InFlightRequest], cause: Cause) -> None:
        """These cannot go on here."""

    def failed(self, request: InFlightRequest, error: Exception) -> None:
        """Something went wrong with this one here: it ends, if it has not ended yet."""


class WorkerConnection:
    """Keeps one worker's stream open and moves requests and events over it. Runs on one event loop."""

    def __init__(self, worker_id: str, client: WorkerClient, router_id: str, listener: ConnectionListener) -> None:
        self.worker_id = worker_id
        self.client = client
        self.in_flight = InFlightRequests(listener)
        self.info: WorkerInfo | None = None  # the worker's last answer
        self.load: WorkerLoad | None = None  # what it said last
        self.is_open = False
        self.is_draining = False
        self.is_closing = False  # the stream ends on purpose
        self._router_id = router_id
        self._listener = listener
        self._tasks = BackgroundTasks()
        self._calls: set[asyncio.Task[Any]] = set()  # that nobody can answer once the connection is broken
        self._submitting: set[str] = set()
        self._withdrawn: set[str] = set()  # while they were being submitted
        self._reader: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # of the present stream

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be sent here."""
        return self.is_open and not self.is_draining

    @property
    def state(self) -> Literal["open", "closed", "draining"]:
        """For people and metrics."""
        return "draining" if self.is_draining else "open" if self.is_open else "closed"

    @property
    def limits(self) -> ModelLimits | None:
        """What the worker's model can do, as it said last."""
        if self.info is None:
            return None
        return ModelLimits(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)

    def start(self) -> None:
        """Begin to keep the stream open."""
        self._reader = self._tasks.spawn(self._keep_open())

    async def close(self, *, is_lost: bool = False) -> None:
        """End the stream for good; `is_lost`: the worker is not there any more, so that nobody ends it on purpose."""
        self.is_draining, self.is_closing = True, not is_lost
        await self._tasks.cancel()

    async def drain(self, drain_s: float) -> int:
        """Take nothing new, and wait until all has ended; what has not by then is handed over. Returns how many that were."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self.in_flight.emptied()
        requests = self.in_flight.take_all()
        if requests:
            request_ids = [request.attempt.request_id for request in requests]
            self._withdrawn |= self._submitting.intersection(request_ids)
            self._hand_over(requests, "moved")
            await self._send_abort(request_ids)
        return len(requests)

    async def submit(self, attempts: Attempts) -> list[ErrorInfo | None]:
        """Ask the worker to take attempts that are in `in_flight`: all or none; an entry for each as in `WorkerClient.submit`.

        Before it gets one that was lost with another worker, it has to show that it lives: of two workers that die together the
        second must not count as this request's doing.

        Raises:
            ConnectionBroken: the connection broke; `lost` was told.
        """
        request_ids = {attempt.request_id for _, attempt in attempts}
        self._submitting |= request_ids
        try:
            if any(request.record.num_resumes for request, _ in attempts):
                await self._ask(self.client.info())
            for request, attempt in attempts:
                if request.attempt is attempt:  # it may have moved meanwhile
                    request.send()
            return await self._ask(self.client.submit(self._router_id, [attempt for _, attempt in attempts]))
        except CallFailed:
            self._abort(list(request_ids))  # it may have taken them
            return [ErrorInfo.of(WorkerLost("The worker did not answer."))] * len(attempts)
        finally:
            self._submitting -= request_ids
            if withdrawn := self._withdrawn & request_ids:
                self._withdrawn -= withdrawn
                self._abort(list(withdrawn))

    def withdraw(self, requests: Sequence[InFlightRequest]) -> None:
        """Abort attempts, as soon as the worker has them; returns at once."""
        request_ids = [request.attempt.request_id for request in requests]
        known = {one for one in request_ids if self.in_flight.remove(one) is not None}
        self._withdrawn |= known & self._submitting
        if now := [one for one in request_ids if one in known - self._submitting]:
            self._abort(now)

    def resync(self) -> None:
        """Ask for the whole index again; returns at once."""
        self._tasks.spawn(self._ask_resync())

    async def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        """The worker's answer.

        Raises:
            ConnectionBroken: the connection broke meanwhile, or right after the call had failed.
            CallFailed: the call failed, and the connection is whole.
        """
        stream_ended = self._ended
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
            await asyncio.wait_for(stream_ended.wait(), SUBMIT_GRACE_S)
        except TimeoutError:
            raise CallFailed from error
        raise ConnectionBroken

    async def _keep_open(self) -> None:
        pause_s = FIRST_PAUSE_S
        lost: list[str] = []
        while not self.is_draining:
            error: Exception | None = None
            try:
                await self._read(lost)
            except Exception as caught:
                error = caught
            finally:
                was_open = self.is_open
                lost = [*([] if was_open else lost), *self._lose()]
            if was_open:
                logger.warning(
                    "The event stream of worker %s broke (%d requests): %r", self.worker_id, len(lost), error
                )
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _read(self, lost: list[str]) -> None:
        """Open the stream and read it until it ends. `lost` are attempts that the worker may still compute for nobody."""
        async with contextlib.aclosing(self.client.open_stream(self._router_id)) as stream:
            async for message in stream:
                if not self.is_open:
                    await self._opened(lost)
                self._take(message)

    async def _opened(self, lost: list[str]) -> None:
        self.info = await self.client.info()
        if lost:
            await self.client.abort(self._router_id, lost)
        self._ended = asyncio.Event()
        self.is_open = True
        self._listener.opened(self)

    def _take(self, message: WorkerMessage) -> None:
        if message.load is not None:
            self.load = message.load
        if message.kv is not None or message.load is not None:
            self._listener.told(self, message)
        lost, torn, failed = self.in_flight.dispatch(message.events)
        if torn:
            logger.warning("Output of %d requests is missing between worker %s and here.", len(torn), self.worker_id)
            self._abort([request.attempt.request_id for request in torn])
            self._hand_over(torn, "torn")
        if lost:
            self._hand_over(lost, "lost")
        for request, error in failed:
            self._fail(request, error)
            self._abort([request.attempt.request_id])

    def _lose(self) -> list[str]:
        """The stream has ended: hand over what was on it; returns the attempts' ids."""
        for call in list(self._calls):
            call.cancel()
        self._ended.set()
        requests = self.in_flight.take_all()
        request_ids = [request.attempt.request_id for request in requests]
        if self.is_open:
            self.is_open = False
            try:
                self._listener.closed(self)
            except Exception as error:  # a bug; what was taken must be handed over all the same
                logger.error("Worker %s could not be taken off the list.\n%s", self.worker_id, _details(error))
            self._hand_over(requests, "lost")
        return request_ids

    def _hand_over(self, requests: list[InFlightRequest], cause: Cause) -> None:
        """Requests that cannot go on here. Should that fail, which would be a bug, they end: nobody waits for ever."""
        try:
            self._listener.lost(self, requests, cause)
        except Exception as error:
            for request in requests:
                if not request.has_ended and request.worker_id in (None, self.worker_id):
                    self._fail(request, error)

    def _fail(self, request: InFlightRequest, error: Exception) -> None:
        """Something went wrong with this request, which would be a bug: it ends, and nothing else does."""
        request_id = request.original.request_id
        logger.error(
            "Request %s failed in the router.\n%s", request_id, _details(error), extra={"request_id": request_id}
        )
        self._listener.failed(request, error)

    def _abort(self, request_ids: list[str]) -> None:
        if self.is_open:
            self._tasks.spawn(self._send_abort(request_ids))

    async def _send_abort(self, request_ids: list[str]) -> None:
        try:
            await self.client.abort(self._router_id, request_ids)
        except Exception as error:  # a worker that is gone computes nothing
            logger.info("An abort did not reach worker %s: %r", self.worker_id, error)

    async def _ask_resync(self) -> None:
        """Until the worker has heard it, or its stream ends: a mirror tells of a gap only once."""
        stream_ended, pause_s = self._ended, FIRST_PAUSE_S
        while not stream_ended.is_set():
            try:
                await self.client.resync(self._router_id)
                return
            except Exception as error:
                logger.info("Worker %s was not asked for its index: %r", self.worker_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _details(error: Exception) -> str:
    return "".join(traceback_lines(error, with_messages=False))
