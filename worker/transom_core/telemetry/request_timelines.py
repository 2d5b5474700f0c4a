"""Timelines of a process's last requests: what happened to each request, in order, in bounded memory.

- **timeline event**: one thing that happened to a request (queued, admitted, preempted...), with its time and its figures.
- **timeline**: all events of one request at one router or worker. It holds neither prompts nor generated text.
- **timeline store**: the timelines of the requests that run, and of the last ones that ended.

Each router and each worker has a store of its own; `/debug/requests/{id}` joins their events. One thread writes to a store, and any
thread may read from it. The events of an ended request are one string of bytes: 60 bytes an event, where its objects take 280.

A worker's request id is `{response id}-{prompt}-{choice}`, with `+{attempt}` where the request migrated: `chatcmpl-0f-1-2+1` is the
second attempt at choice 2 of prompt 1 of the response `chatcmpl-0f`.
"""

import pickle
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from transom_core.clock import steady_time_s
from transom_core.fair_cache import CLIENT_SHARE

MAX_TIMELINES = 2000  # of running and ended requests together
MAX_EVENTS = 200  # events of one timeline; above it, events from the timeline's middle are merged
MAX_ENDED_EVENTS = 40_000  # events of all ended timelines together: about 3 MB
_NUM_FIRST = 50  # events that a long timeline keeps from its beginning
_NUM_MERGED = 50  # events that are merged at once

_REQUEST_ID = re.compile(r"(.+)-(\d+)-(\d+)(?:\+\d+)?")


def response_id_of(request_id: str) -> str:
    """Return the id of the HTTP response that a worker's request belongs to, which is the id that the client sees."""
    match = _REQUEST_ID.fullmatch(request_id)
    return match[1] if match else request_id


def prompt_and_choice_of(request_id: str) -> tuple[int, int] | None:
    """Return the indices of the prompt and of the choice that a worker's request computes; None if its id does not have them."""
    match = _REQUEST_ID.fullmatch(request_id)
    return (int(match[2]), int(match[3])) if match else None


class TimelineEvent(NamedTuple):
    """One thing that happened to a request: its time in seconds since the epoch, its kind, and its figures as JSON values."""

    at_s: float
    kind: str
    facts: dict[str, Any]


class Timeline:
    """The events of one request.

    A long timeline keeps its first events and its last ones: whenever it has more than `MAX_EVENTS`, `_NUM_MERGED` events after the
    first `_NUM_FIRST` become one event of the kind `summed_up`.
    """

    __slots__ = ("_events", "_packed", "arrival_s", "client", "end_s", "num_events", "request_id")

    def __init__(self, request_id: str, arrival_s: float, *, client: str = "") -> None:
        self.request_id = request_id
        self.client = client  # who sent the request; empty if unknown
        self.arrival_s = arrival_s
        self.end_s = 0.0  # 0 while the request runs
        self.num_events = 0
        self._events: list[TimelineEvent] = []  # while the request runs
        self._packed = b""  # its events after its end

    @property
    def events(self) -> list[TimelineEvent]:
        """Return the events, in order."""
        events = self._events  # read before `_packed`, which `end` sets first
        return [TimelineEvent(*event) for event in pickle.loads(self._packed)] if self._packed else list(events)

    def end(self, at_s: float) -> None:
        """The request has ended: no more events follow, and those that there are take less memory from now on."""
        self.end_s = at_s
        self._packed = self._packed or pickle.dumps([tuple(event) for event in self._events])
        self._events = []

    def add(self, kind: str, at_s: float | None = None, **facts: Any) -> None:
        """Add an event, at the current time by default. An event after the request's end is ignored."""
        if self.end_s:
            return
        self._events.append(TimelineEvent(steady_time_s() if at_s is None else at_s, kind, facts))
        if len(self._events) > MAX_EVENTS:
            self._merge_middle()
        self.num_events = len(self._events)

    def _merge_middle(self) -> None:
        middle = self._events[_NUM_FIRST : _NUM_FIRST + _NUM_MERGED]
        facts = {
            "steps": sum(event.facts["steps"] if event.kind == "summed_up" else 1 for event in middle),
            "tokens": sum(event.facts.get("tokens", 0) for event in middle),
            "until_s": middle[-1].at_s,
        }
        self._events[_NUM_FIRST : _NUM_FIRST + _NUM_MERGED] = [TimelineEvent(middle[0].at_s, "summed_up", facts)]


class TimelineStore:
    """A bounded set of timelines. A new timeline displaces the oldest ended one, or the oldest running one if none has ended.

    If a client has more than a quarter of the ended timelines, the client with the most of them loses its oldest one instead.
    """

    def __init__(self, *, max_timelines: int = MAX_TIMELINES, max_ended_events: int = MAX_ENDED_EVENTS) -> None:
        self._max_timelines = max_timelines
        self._max_ended_events = max_ended_events
        self._running: dict[str, Timeline] = {}  # by request id, in order of arrival
        self._ended: dict[str, Timeline] = {}  # by request id, in order of their ends
        self._num_ended_events = 0
        self._num_ended_of: Counter[str] = Counter()  # client -> its ended timelines

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def begin(self, timeline: Timeline) -> None:
        """Store the timeline of a request that has arrived. It replaces a timeline with an equal request id."""
        self._forget_ended(timeline.request_id)
        self._running.pop(timeline.request_id, None)
        self._running[timeline.request_id] = timeline
        if len(self) > self._max_timelines:
            if self._ended:
                self._displace()
            else:
                self._running.pop(next(iter(self._running)))

    def end(self, timeline: Timeline, at_s: float | None = None) -> None:
        """Mark the end of a request, at the current time by default. The store keeps its timeline until newer ones displace it."""
        timeline.end(steady_time_s() if at_s is None else at_s)
        if self._running.get(timeline.request_id) is not timeline:
            return
        del self._running[timeline.request_id]
        self._ended[timeline.request_id] = timeline
        self._num_ended_events += timeline.num_events
        self._num_ended_of[timeline.client] += 1
        while self._num_ended_events > self._max_ended_events:
            self._displace()

    @property
    def num_events(self) -> int:
        """Return the number of events of all timelines."""
        return self._num_ended_events + sum(timeline.num_events for timeline in self.running())

    def running(self) -> list[Timeline]:
        """Return the timelines of the requests that have not ended, the oldest first."""
        return list(self._running.values())

    def of_response(self, response_id: str) -> list[Timeline]:
        """Return the timelines of all choices and attempts of one HTTP response."""
        timelines = [*list(self._running.values()), *list(self._ended.values())]
        return [timeline for timeline in timelines if response_id_of(timeline.request_id) == response_id]

    def newest(self) -> Iterator[Timeline]:
        """Yield the timelines of running requests, the newest first, then those of ended requests, the newest first."""
        yield from reversed(self.running())
        yield from reversed(list(self._ended.values()))

    def _displace(self) -> None:
        """Forget the oldest ended timeline: that of the client with most of them, if it has more than a quarter."""
        client, most = max(self._num_ended_of.items(), key=lambda item: item[1])
        has_most = most > len(self._ended) * CLIENT_SHARE
        self._forget_ended(
            next(key for key, timeline in self._ended.items() if timeline.client == client or not has_most)
        )

    def _forget_ended(self, request_id: str) -> None:
        timeline = self._ended.pop(request_id, None)
        if timeline is not None:
            self._num_ended_events -= timeline.num_events
            self._num_ended_of[timeline.client] -= 1
            if not self._num_ended_of[timeline.client]:
                del self._num_ended_of[timeline.client]
