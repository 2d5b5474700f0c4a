"""The events of one HTTP request, from whatever workers they come, for the one who writes its response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transom_cluster.router.output_events import joined
from transom_cluster.telemetry.request_timeline import RequestTimeline
from transom_worker.contract import ErrorInfo, OutputEvent, Request

MAX_BUFFERED = 512  # events of which a slow client's answer keeps each; more are joined, one a choice


class OutputStream:
    """The events of one HTTP request's choices, in order of arrival. `admitted` and `next` are for one reader.

    An HTTP request has one, whatever its number of prompts and choices, so that it wakes once per engine step.
    `num_unfinished` counts choices whose last event `next` has not returned yet.
    """

    def __init__(self, requests: Sequence[Request], timeline: RequestTimeline | None = None) -> None:
        self.requests = requests
        self.timeline = timeline or RequestTimeline(requests)
        self.num_unfinished = len(requests)
        self._num_unadmitted = len(requests)
        self._refusal: Exception | None = None
        self._events: list[tuple[int, OutputEvent]] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, event: OutputEvent) -> None:
        """Add an event of choice `index` and wake the reader."""
        self._events.append((index, event))
        if len(self._events) > MAX_BUFFERED + len(self.requests):
            self._events = _joined_by_choice(self._events)
        self._wake()

    def admit(self) -> None:
        """A worker has one more of the requests. Those who wait for `admitted` go on with the last one."""
        self._num_unadmitted -= 1
        self._wake()

    def fail(self, index: int, event: OutputEvent, error: Exception) -> None:
        """Choice `index` cannot go on: the reason for a refusal until all are admitted, an error event from then on."""
        if self._num_unadmitted:
            self._refusal = self._refusal or error
            self._wake()
        else:
            self.put(index, event)

    async def admitted(self) -> None:
        """Wait until workers have all requests.

        Raises:
            TransomError: one was refused; the others have to be withdrawn.
        """
        while self._num_unadmitted and self._refusal is None:
            await self._sleep()
        if self._refusal is not None:
            raise self._refusal

    async def next(self) -> list[tuple[int, OutputEvent]]:
        """All events since the last call, at least one; waits for it. A slow reader gets many at once."""
        while not self._events:
            await self._sleep()
        events, self._events = self._events, []
        self.num_unfinished -= sum(event.finish_reason is not None for _, event in events)
        return events

    async def _sleep(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def error_event(request_id: str, position: int, error: Exception) -> OutputEvent:
    """The last event of a choice that an error ended."""
    info = ErrorInfo.of(error)
    return OutputEvent(request_id=request_id, position=position, finish_reason="error", error=info)


def _joined_by_choice(events: Sequence[tuple[int, OutputEvent]]) -> list[tuple[int, OutputEvent]]:
    """At most two events a choice, errors being kept apart: memory is then that of the tokens themselves."""
    by_choice: dict[int, list[OutputEvent]] = {}
    errors = []
    for index, event in events:
        if event.error is None:
            by_choice.setdefault(index, []).append(event)
        else:
            errors.append((index, event))
    return [*((index, joined(own)) for index, own in by_choice.items()), *errors]
