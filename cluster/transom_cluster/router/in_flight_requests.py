"""Requests on their way through one or several workers: what of each has come so far, and what is new in an event.

Runs on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from transom_cluster.router.failover import LossRecord
from transom_cluster.router.output_events import without_first
from transom_cluster.router.output_stream import OutputStream, error_event
from transom_cluster.routing.placer import PlacementDecision
from transom_worker.contract import ErrorInfo, OutputEvent, Request, Usage
from transom_worker.errors import WorkerLost

DEADLINE_GRACE_S = 0.25  # the worker itself tells, if it can


class InFlightRequest:
    """One request until its last event. Each attempt at a worker has an id of its own, so that an earlier one's events drop.

    `token_ids` is all output so far, `num_new_tokens` what of it the present attempt brought.
    """

    def __init__(self, output: OutputStream, index: int, original: Request) -> None:
        self.output = output
        self.index = index
        self.original = original
        self.timeline = output.timeline
        self.token_ids = list(original.resumed_output_ids)
        self.attempt = original
        self.is_sent = False  # the attempt is on its way to the worker, or there
        self.awaits_reply = False  # and the worker has not said that it took it
        self.num_new_tokens = 0
        self.worker_id: str | None = None  # who has the attempt
        self.has_ended = False
        self.is_admitted = False
        self.is_resuming = False  # lost, and not yet taken by another worker
        self.record = LossRecord()
        self.refusals: dict[str, ErrorInfo] = {}  # by workers that need not be asked again just now
        self.wait_until_s = 0.0
        self.has_begun = False  # the attempt has brought an event
        self.timer: asyncio.TimerHandle | None = None
        self._num_attempts = 0
        self._num_chars: int | None = None  # unknown until the first event: a resumed request starts in mid-text
        self._usage: Usage | None = None

    @property
    def place_in_line(self) -> tuple[bool, int, float]:
        """Streams that somebody is reading come first, then lower priority numbers, then who came first."""
        return not self.token_ids, self.original.priority, self.original.arrival_s

    def watch_deadline(self, on_late: Callable[[InFlightRequest], None]) -> None:
        """Call when the request's deadline has passed, if it has one and nobody watches it yet; it may have ended by then."""
        deadline_s = self.original.deadline_s
        if self.timer is None and deadline_s is not None:
            delay_s = max(0.0, deadline_s - time.time()) + DEADLINE_GRACE_S
            self.timer = asyncio.get_running_loop().call_later(delay_s, on_late, self)

    def begin_attempt(self) -> Request:
        """What the next worker gets: the request, and all that has come of its answer."""
        if self._num_attempts:
            self.attempt = self._resumed()
        self._num_attempts += 1
        self.num_new_tokens = 0
        self.is_sent = self.awaits_reply = False
        self.has_begun = False
        return self.attempt

    def go_to(self, placed: PlacementDecision, *, policy: str) -> None:
        """That worker gets the attempt."""
        self.worker_id = placed.worker_id
        num_resumed = len(self.attempt.resumed_output_ids)
        trace_parent = self.timeline.placed(self.index, placed, policy=policy, num_resumed=num_resumed)
        if trace_parent is not None:
            self.attempt = replace(self.attempt, trace_parent=trace_parent)

    def send(self) -> None:
        """From here on the worker may be computing the attempt."""
        self.is_sent = self.awaits_reply = True
        self.timeline.sent(self.index, self.worker_id)

    def admit(self) -> None:
        """A worker has taken the attempt."""
        if self.awaits_reply:
            self.awaits_reply = False
            self.timeline.accepted(self.index, self.worker_id)
        if not self.is_admitted:
            self.is_admitted = True
            self.output.admit()

    def take(self, event: OutputEvent) -> bool:
        """Pass on what is new of an event; False: output in between is missing, and nothing was taken."""
        num_seen = len(self.token_ids) - event.position
        if num_seen < 0:
            return False
        num_chars = event.text_offset if self._num_chars is None else self._num_chars
        num_seen_chars = num_chars - event.text_offset
        fresh = without_first(event, num_seen, num_seen_chars) if num_seen or num_seen_chars else event
        if fresh.usage is not None:
            fresh = self._with_usage(fresh, fresh.usage)
        if fresh.token_ids and not self.num_new_tokens:
            self.timeline.began(self.index, self.worker_id, event.usage)
        self.num_new_tokens += len(fresh.token_ids)
        self.token_ids += fresh.token_ids
        self._num_chars = num_chars + len(fresh.text)
        first = fresh.usage is not None or fresh.prompt_logprobs is not None
        if fresh.token_ids or fresh.text or fresh.finish_reason or first:
            self.output.put(self.index, fresh)
        if fresh.finish_reason is not None:
            self.end()
            if fresh.error is not None:
                self.timeline.failed(self.index, fresh.error.kind, len(self.token_ids))
            else:
                self.timeline.finished(self.index, fresh.finish_reason, len(self.token_ids))
        return True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.end()
        self.timeline.failed(self.index, type(error).__name__, len(self.token_ids))
        self.output.fail(self.index, error_event(self.original.request_id, len(self.token_ids), error), error)

    def end(self) -> None:
        """Nothing more comes."""
        self.has_ended = True
        if self.timer is not None:
            self.timer.cancel()

    def _resumed(self) -> Request:
        original, params = self.original, self.original.params
        if self.token_ids and params.prompt_logprobs is not None:  # they came with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(
            original,
            request_id=f"{original.request_id}+{self._num_attempts}",
            params=params,
            resumed_output_ids=tuple(self.token_ids),
        )

    def _with_usage(self, event: OutputEvent, usage: Usage) -> OutputEvent:
        """A resumed request may find its own prompt in a cache: what counts is what the first worker found."""
        if self._usage is None:
            self._usage = usage
            if self.original.choice_index == 0:
                self.timeline.hit(usage)
        if usage.num_cached_tokens == self._usage.num_cached_tokens:
            return event
        return replace(event, usage=replace(usage, num_cached_tokens=self._usage.num_cached_tokens))


class OutputListener(Protocol):
    """Who is told of every event that was taken."""

    def advanced(self, request: InFlightRequest, event: OutputEvent) -> None:
        """An event has come; it may be the last."""


class InFlightRequests:
    """The attempts that one worker has, by request id."""

    def __init__(self, listener: OutputListener) -> None:
        self._listener = listener
        self._requests: dict[str, InFlightRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: InFlightRequest) -> None:
        """Expect events of a request's attempt."""
        self._requests[request.attempt.request_id] = request
        self._empty.clear()

    @property
    def request_ids(self) -> list[str]:
        """Of all attempts."""
        return list(self._requests)

    def has(self, request_id: str) -> bool:
        """Whether events of this attempt are expected."""
        return request_id in self._requests

    def remove(self, request_id: str) -> InFlightRequest | None:
        """Expect no more of an attempt; None where nothing was expected."""
        request = self._requests.pop(request_id, None)
        if not self._requests:
            self._empty.set()
        return request

    def take_all(self) -> list[InFlightRequest]:
        """Expect nothing any more; returns what was expected."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._empty.set()
        return requests

    async def emptied(self) -> None:
        """Wait until nothing is expected."""
        await self._empty.wait()

    def dispatch(
        self, events: Iterable[OutputEvent]
    ) -> tuple[list[InFlightRequest], list[InFlightRequest], list[tuple[InFlightRequest, Exception]]]:
        """Hand one step's events to their answers; those of unknown (withdrawn) attempts are dropped.

        Returns requests that the worker has lost, requests of which output is missing, and requests whose event raised an error.
        None of them is expected any more.
        """
        lost: list[InFlightRequest] = []
        torn: list[InFlightRequest] = []
        failed: list[tuple[InFlightRequest, Exception]] = []
        for event in events:
            request = self._requests.get(event.request_id)
            if request is None:
                continue
            try:
                if event.error is not None and isinstance(event.error.error(), WorkerLost):
                    self.remove(event.request_id)
                    lost.append(request)
                elif not request.take(event):
                    self.remove(event.request_id)
                    torn.append(request)
                else:
                    if request.has_ended:
                        self.remove(event.request_id)
                    self._listener.advanced(request, event)
            except Exception as error:  # a bug, and this request's alone
                self.remove(event.request_id)
                failed.append((request, error))
        return lost, torn, failed
