"""The events of requests and blocks between two frames: admissions, hits, window repairs, preemptions, ends and evictions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from transom_worker.kvcache.prefix.prefix_outcome import HIT, REPAIRED
from transom_worker.scheduling.sequence import Sequence

MAX_EVENTS = 256


@dataclass(frozen=True, slots=True)
class MapEvent:
    """One entry of a frame's `events`; docs/block_map.md has the meaning of the fields."""

    time_s: float
    kind: str
    request: str | None
    group: int | None
    count: int
    detail: str


class EventLog:
    """The newest `MAX_EVENTS` events since they were last taken. While there is no watcher, it keeps none. Used on the engine's
    thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._events: deque[MapEvent] = deque(maxlen=MAX_EVENTS)
        self._num_added = 0

    def begin(self) -> None:
        """Keep events from now on: there is a watcher."""
        self.is_on = True

    def end(self) -> None:
        """Keep no events from now on: the last watcher has left."""
        self.is_on = False
        self.take()

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """The scheduler has admitted a request, for the first time or after a preemption; `tokens` by outcome of the cache
        search."""
        if not self.is_on:
            return
        request_id, num_tokens = sequence.request.request_id, len(sequence.token_ids)
        hit, repaired = tokens.get(HIT, 0), tokens.get(REPAIRED, 0)
        self._add("admitted", request_id, num_tokens, f"{num_tokens} tokens")
        if hit:
            self._add("hit", request_id, hit, f"{hit} of {num_tokens} tokens were cached")
        if repaired:
            self._add("repair", request_id, repaired, f"{repaired} tokens are computed again to repair windows")

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """The scheduler preempts a request."""
        if self.is_on:
            processed = 0 if sequence.blocks is None else sequence.blocks.processed
            self._add("preempted", sequence.request.request_id, processed, f"{mode}; {processed} tokens were computed")

    def finished(self, request_id: str, finish_reason: str) -> None:
        """A request has ended: stop, length, abort or error."""
        if self.is_on:
            self._add("finished", request_id, 1, finish_reason)

    def take(self) -> tuple[list[MapEvent], int]:
        """The events since the last call, and the number of older ones that were dropped."""
        events, num_dropped = list(self._events), self._num_added - len(self._events)
        self._events.clear()
        self._num_added = 0
        return events, num_dropped

    def _add(self, kind: str, request_id: str, count: int, detail: str) -> None:
        self._events.append(MapEvent(time.time(), kind, request_id, None, count, detail))
        self._num_added += 1
