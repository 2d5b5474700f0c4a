"""Requests that wait for events: which HTTP answer each belongs to, and how far it is.

Runs on the event loop only. An HTTP request has one `Answer`, whatever its number of prompts and choices, so that it wakes once
per engine step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from transom_worker.contract import ErrorInfo, OutputEvent, Request
from transom_worker.errors import StepFailed


class Answer:
    """The events of one HTTP request's choices, in order of arrival. `next` is for one reader.

    `num_unfinished` counts choices whose last event `next` has not returned yet.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.num_unfinished = len(requests)
        self._events: list[tuple[int, OutputEvent]] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, event: OutputEvent) -> None:
        """Add an event of choice `index` and wake the reader."""
        self._events.append((index, event))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> list[tuple[int, OutputEvent]]:
        """All events since the last call, at least one; waits for it. A slow reader gets many at once."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        self.num_unfinished -= sum(event.finish_reason is not None for _, event in events)
        return events


class _Place:
    """Where one request's events go, and what has gone there: output tokens and characters."""

    __slots__ = ("answer", "index", "num_chars", "num_tokens")

    def __init__(self, answer: Answer, index: int, num_tokens: int) -> None:
        self.answer = answer
        self.index = index
        self.num_tokens = num_tokens
        self.num_chars: int | None = None  # unknown until the first event: a resumed request starts in mid-text

    def take(self, event: OutputEvent) -> OutputEvent | None:
        """The part of the event that is new, or None.

        Raises:
            StepFailed: events in between are missing.
        """
        num_seen = self.num_tokens - event.position
        if num_seen < 0:
            raise StepFailed(f"Output {self.num_tokens} to {event.position} of {event.request_id} was lost.")
        num_chars = event.text_offset if self.num_chars is None else self.num_chars
        num_seen_chars = num_chars - event.text_offset
        if num_seen or num_seen_chars:
            event = _without(event, num_seen, num_seen_chars)
        self.num_tokens += len(event.token_ids)
        self.num_chars = num_chars + len(event.text)
        first = event.usage is not None or event.prompt_logprobs is not None
        return event if event.token_ids or event.text or event.finish_reason or first else None


class RequestsInFlight:
    """Routes events to answers and drops what was seen before."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, answer: Answer) -> None:
        """Expect events for every request of `answer`."""
        for index, request in enumerate(answer.requests):
            self._places[request.request_id] = _Place(answer, index, len(request.resumed_output_ids))

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Expect no more events for these; returns those that had not ended."""
        return [request_id for request_id in request_ids if self._places.pop(request_id, None) is not None]

    def dispatch(self, events: Iterable[OutputEvent]) -> None:
        """Hand one step's events to their answers. Events of unknown (aborted) requests are dropped."""
        for event in events:
            place = self._places.get(event.request_id)
            if place is None:
                continue
            try:
                fresh = place.take(event)
            except StepFailed as error:
                self._fail(event.request_id, ErrorInfo.of(error))
                continue
            if fresh is None:
                continue
            if fresh.finish_reason is not None:
                del self._places[event.request_id]
            place.answer.put(place.index, fresh)

    def fail_all(self, error: Exception) -> list[str]:
        """End every request with an error event; returns their ids."""
        request_ids = list(self._places)
        for request_id in request_ids:
            self._fail(request_id, ErrorInfo.of(error))
        return request_ids

    def _fail(self, request_id: str, error: ErrorInfo) -> None:
        place = self._places.pop(request_id)
        event = OutputEvent(request_id=request_id, position=place.num_tokens, finish_reason="error", error=error)
        place.answer.put(place.index, event)


def _without(event: OutputEvent, num_tokens: int, num_chars: int) -> OutputEvent:
    """The event without its first tokens and characters."""
    num_tokens = min(num_tokens, len(event.token_ids))
    num_chars = max(0, num_chars)
    return replace(
        event,
        position=event.position + num_tokens,
        token_ids=event.token_ids[num_tokens:],
        text=event.text[num_chars:],
        text_offset=event.text_offset + min(num_chars, len(event.text)),
        logprobs=None if event.logprobs is None else event.logprobs[num_tokens:],
        prompt_logprobs=None if num_tokens else event.prompt_logprobs,
    )
