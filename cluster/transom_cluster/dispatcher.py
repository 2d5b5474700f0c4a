"""One worker's link: its long event stream, kept open, and the requests that live on it.

When the stream breaks, every request on it ends with an error event and the stream is opened again, with growing pauses.
Nothing here waits for a worker that is gone: without an open stream a submission is refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

from transom_cluster.openai.to_contract import ModelLimits
from transom_cluster.requests_in_flight import Answer, RequestsInFlight
from transom_cluster.worker_client import WorkerClient
from transom_worker.contract import ErrorInfo, WorkerInfo
from transom_worker.errors import EngineDead

logger = logging.getLogger("transom.router")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

_LOST = "The worker that computed this answer was lost; send the request again."
_NOT_READY = "The worker is not ready (starting, or being replaced); try again in a moment."


class WorkerLink:
    """Keeps one worker's stream open and moves requests and events over it. Runs on one event loop."""

    def __init__(self, client: WorkerClient, router_id: str) -> None:
        self.client = client
        self.in_flight = RequestsInFlight()
        self.limits: ModelLimits | None = None  # known while the stream is open
        self.info: WorkerInfo | None = None  # the worker's last answer
        self._router_id = router_id
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submits: set[asyncio.Task[list[ErrorInfo | None]]] = set()
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted."""
        return self.limits is not None

    def start(self) -> None:
        """Begin to keep the stream open."""
        self._reader = asyncio.create_task(self._keep_open(), context=contextvars.Context())

    async def stop(self) -> None:
        """Close the stream; what is still running ends with an error."""
        tasks = [*self._tasks, *([self._reader] if self._reader is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, answer: Answer) -> None:
        """Send the requests of `answer` to the worker; their events go there. All are admitted, or none.

        Raises:
            TransomError: a request was refused, or there is no worker.
        """
        if not self.is_open:
            raise EngineDead(_NOT_READY)
        self.in_flight.add(answer)
        task = self._spawn(self.client.submit(self._router_id, list(answer.requests)))
        self._submits.add(task)
        task.add_done_callback(self._submits.discard)
        try:
            results = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # not we, but the link went away
                raise EngineDead(_LOST) from None
            task.add_done_callback(lambda _: self._spawn(self._send_abort(_ids(answer))))
            raise
        except Exception as error:
            logger.warning("A submission failed: %r", error)
            raise EngineDead(_NOT_READY) from error
        for result in results:
            if result is not None:
                self.in_flight.remove(_ids(answer))
                raise result.error()

    def abandon(self, answer: Answer) -> None:
        """Abort what has not ended of `answer`; returns at once."""
        unfinished = self.in_flight.remove(_ids(answer))
        if unfinished and self.is_open:
            self._spawn(self._send_abort(unfinished))

    async def _keep_open(self) -> None:
        pause_s = FIRST_PAUSE_S
        lost: list[str] = []
        while True:
            error: Exception | None = None
            try:
                await self._read(lost)
            except Exception as caught:
                error = caught
            finally:
                was_open, self.limits = self.is_open, None
                lost = [*([] if was_open else lost), *self._fail_all()]
            if was_open:
                logger.warning("The event stream of a worker broke (%d requests): %r", len(lost), error)
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _read(self, lost: list[str]) -> None:
        """Open the stream and read it until it ends. `lost` are requests that the worker may still compute for nobody."""
        async with contextlib.aclosing(self.client.open_stream(self._router_id)) as stream:
            async for message in stream:
                if self.limits is None:
                    await self._opened(lost)
                self.in_flight.dispatch(message.events)

    async def _opened(self, lost: list[str]) -> None:
        self.info = info = await self.client.info()
        if lost:
            await self.client.abort(self._router_id, lost)
        self.limits = ModelLimits(max_model_len=info.max_model_len, vocab_size=info.vocab_size)

    def _fail_all(self) -> list[str]:
        for submit in list(self._submits):
            submit.cancel()
        return self.in_flight.fail_all(EngineDead(_LOST))

    async def _send_abort(self, request_ids: list[str]) -> None:
        try:
            await self.client.abort(self._router_id, request_ids)
        except Exception as error:  # a worker that is gone computes nothing
            logger.info("An abort did not reach its worker: %r", error)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task outside the caller's context, so that Serve does not cancel it with the caller's HTTP request."""
        task = asyncio.create_task(coroutine, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _ids(answer: Answer) -> list[str]:
    return [request.request_id for request in answer.requests]
