"""`OutputStream`: collects the output events of one HTTP request's choices for the task that writes the response.

The choices may run at several workers. All prompts and choices of a request share one stream, so that the response's task wakes
once per engine step. Events are cut where a migrated request repeats output, and joined where a client is slow.
"""

import asyncio
from collections.abc import Sequence

from transom_core.contract import ErrorInfo, LogprobTable, OutputEvent, Request

MAX_BUFFERED = 512  # if more events wait than this, plus one per choice, the events of each choice are joined
# An event with this many tokens is not joined with further events, because a whole event is parsed at once.
MAX_JOINED_TOKENS = 1024


class OutputStream:
    """The events of one HTTP request's choices, in order of arrival. One task at a time may wait in `admitted` or `next`.

    `num_unfinished` counts the choices whose last event `next` has not returned yet. `identity` is the identity of the model that
    computes the answer (`eligibility`). It is None until a choice is placed at a worker, and becomes None again if every choice
    leaves its worker before there is any output.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.num_unfinished = len(requests)
        self.identity: str | None = None
        self._num_placed = 0  # choices that are at a worker
        self._has_begun = False  # some choice has output
        self._num_choices = len(requests)
        self._num_unadmitted = len(requests)
        self._refusal: Exception | None = None
        self._events: list[tuple[int, OutputEvent]] = []
        self._max_events = MAX_BUFFERED + len(requests)
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, event: OutputEvent) -> None:
        """Add an event of choice `index` and wake the reader."""
        self._has_begun = True
        self._events.append((index, event))
        if len(self._events) > self._max_events:
            self._events = _joined_by_choice(self._events)
            self._max_events = len(self._events) + MAX_BUFFERED
        self._wake()

    def placed(self, identity: str) -> None:
        """Note that a worker of this identity has one more choice."""
        assert self.identity in (None, identity)
        self.identity = identity
        self._num_placed += 1

    def left_worker(self) -> None:
        """Note that a worker has one choice less."""
        self._num_placed -= 1
        if not self._num_placed and not self._has_begun:
            self.identity = None

    def admit(self) -> None:
        """Note that a worker has accepted one more choice."""
        self._num_unadmitted -= 1
        self._wake()

    def fail(self, index: int, event: OutputEvent, error: Exception) -> None:
        """End choice `index` with an error: until all choices are admitted, `admitted` raises `error`; afterwards `next` returns
        `event`, which has the same error."""
        if self._num_unadmitted:
            self._refusal = self._refusal or error
            self._wake()
        else:
            self.put(index, event)

    async def admitted(self) -> None:
        """Wait until workers have accepted all choices.

        Raises:
            TransomError: one choice was refused or failed; the caller has to withdraw the others.
        """
        while self._num_unadmitted and self._refusal is None:
            await self._sleep()
        if self._refusal is not None:
            raise self._refusal

    async def next(self) -> list[tuple[int, OutputEvent]]:
        """Wait for at least one event, and return all events since the last call, each with the index of its choice."""
        while not self._events:
            await self._sleep()
        events, self._events = self._events, []
        self._max_events = MAX_BUFFERED + self._num_choices
        self.num_unfinished -= sum(event.finish_reason is not None for _, event in events)
        return events

    async def _sleep(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def error_event(request_id: str, position: int, error: Exception) -> OutputEvent:
    """Return the last event of a choice that an error has ended."""
    return OutputEvent(request_id=request_id, position=position, finish_reason="error", error=ErrorInfo.of(error))


def without_first(event: OutputEvent, num_tokens: int, num_chars: int) -> OutputEvent:
    """Return the event without its first `num_tokens` tokens and without the first `num_chars` characters of its text."""
    num_tokens = min(num_tokens, len(event.token_ids))
    num_chars = max(0, num_chars)
    return event._replace(
        position=event.position + num_tokens,
        token_ids=event.token_ids[num_tokens:],
        text=event.text[num_chars:],
        text_offset=event.text_offset + min(num_chars, len(event.text)),
        logprobs=None if event.logprobs is None else event.logprobs[num_tokens:],
        prompt_logprobs=None if num_tokens else event.prompt_logprobs,
    )


def joined(events: Sequence[OutputEvent]) -> OutputEvent:
    """Join consecutive events of one choice, none of which has an error, into one event."""
    first, last = events[0], events[-1]
    usages = [event.usage for event in events if event.usage is not None]
    logprobs = LogprobTable.of(one for event in events for one in event.logprobs or ())
    return first._replace(
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        text="".join(event.text for event in events),
        logprobs=logprobs if len(logprobs) else first.logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=usages[-1] if usages else None,
    )


def _joined_by_choice(events: Sequence[tuple[int, OutputEvent]]) -> list[tuple[int, OutputEvent]]:
    """Return the same output in fewer events: consecutive events of a choice are joined up to `MAX_JOINED_TOKENS`. Errors come
    last.

    A client that does not read then costs little more memory than its tokens and text, and each token is copied only a few times.
    """
    runs: dict[int, list[OutputEvent]] = {}
    num_tokens: dict[int, int] = {}
    found: list[tuple[int, OutputEvent]] = []
    errors = []
    for index, event in events:
        if event.error is not None:
            errors.append((index, event))
            continue
        runs.setdefault(index, []).append(event)
        num_tokens[index] = num_tokens.get(index, 0) + len(event.token_ids)
        if num_tokens[index] >= MAX_JOINED_TOKENS:
            found.append((index, _joined_run(runs.pop(index))))
            del num_tokens[index]
    return [*found, *((index, _joined_run(run)) for index, run in runs.items()), *errors]


def _joined_run(run: Sequence[OutputEvent]) -> OutputEvent:
    return run[0] if len(run) == 1 else joined(run)
