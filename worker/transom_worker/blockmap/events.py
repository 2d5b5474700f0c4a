"""What happened to requests and blocks between two frames, while somebody watches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from transom_worker.kvcache.prefix_outcome import HIT, REPAIRED
from transom_worker.scheduling.sequence import Sequence

MAX_EVENTS = 256


@dataclass(frozen=True, slots=True)
class MapEvent:
    """One entry of a frame's `events`; see docs/block_map.md."""

    time_s: float
    kind: str
    request: str | None
    group: int | None
    count: int
    detail: str


class EventLog:
    """The newest events since they were last taken: a `SchedulerListener`. While nobody watches, nothing is kept. Only on the
    engine's thread."""

    def __init__(self) -> None:
        self._is_on = False
        self._events: deque[MapEvent] = deque(maxlen=MAX_EVENTS)
        self._num_noted = 0

    def begin(self) -> None:
        """Somebody watches from now on."""
        self._is_on = True

    def end(self) -> None:
        """Nobody does any more."""
        self._is_on = False
        self.take()

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """A request was let in, for the first time or again."""
        if not self._is_on:
            return
        request_id, num_tokens = sequence.request.request_id, len(sequence.token_ids)
        hit, repaired = tokens.get(HIT, 0), tokens.get(REPAIRED, 0)
        self._note("admitted", request_id, num_tokens, f"{num_tokens} tokens")
        if hit:
            self._note("hit", request_id, hit, f"{hit} of {num_tokens} tokens were cached")
        if repaired:
            self._note("repair", request_id, repaired, f"{repaired} tokens are computed again to repair windows")

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """A request goes back to the queue."""
        if self._is_on:
            processed = 0 if sequence.blocks is None else sequence.blocks.processed
            self._note("preempted", sequence.request.request_id, processed, f"{mode}; {processed} tokens were computed")

    def finished(self, request_id: str, finish_reason: str) -> None:
        """A request ended: stop, length, abort or error."""
        if self._is_on:
            self._note("finished", request_id, 1, finish_reason)

    def take(self) -> tuple[list[MapEvent], int]:
        """The events since the last call, and how many were too many."""
        events, num_dropped = list(self._events), self._num_noted - len(self._events)
        self._events.clear()
        self._num_noted = 0
        return events, num_dropped

    def _note(self, kind: str, request_id: str, count: int, detail: str) -> None:
        self._events.append(MapEvent(time.time(), kind, request_id, None, count, detail))
        self._num_noted += 1
