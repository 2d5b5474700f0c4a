"""Keeps those of an engine's events that the live block map shows: admissions, hits, window repairs, preemptions and ends.

While no watcher is connected, an event costs at most one addition.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from transom_core.clock import steady_time_s
from transom_worker.kvcache.prefix.prefix_outcome import HIT, REPAIRED
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan, StepTimings
from transom_worker.telemetry.engine_events import EngineEventSink, EngineStepTimes, RequestTimes, WorkerState

MAX_EVENTS = 256
MAX_ENTRIES = 300
PERIOD_S = 1.0

# Time, free pages, and (active, pinned, evictable, free) blocks by group.
Entry = tuple[float, int, tuple[tuple[int, int, int, int], ...]]


@dataclass(frozen=True, slots=True)
class MapEvent:
    """One entry of a frame's `events`; docs/block_map.md has the meaning of the fields."""

    time_s: float
    kind: str
    request: str | None
    group: int | None
    count: int
    detail: str


class History:
    """The last five minutes of the KV pool, one small entry per second, even while no watcher is connected.

    One thread adds entries, and any thread may read them. An idle engine adds none: its last entry holds until the next one.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)

    def add(self, stats: CacheStats) -> None:
        """Add an entry; it replaces the newest entry if that is less than a second after the one before it."""
        now_s = steady_time_s()
        groups = tuple(
            (group.active_blocks, group.pinned_blocks, group.cached_blocks - group.pinned_blocks, group.free_blocks)
            for group in stats.groups
        )
        entries = self._entries
        if len(entries) > 1 and entries[-1][0] - entries[-2][0] < PERIOD_S:
            entries.pop()
        entries.append((now_s, stats.free_pages, groups))

    def entries(self, now_s: float) -> list[list[object]]:
        """Return the entries of a frame: one per second of the last five minutes up to `now_s`, the oldest first."""
        known = list(self._entries)
        if not known:
            return []
        found: list[list[object]] = []
        at_s = max(known[0][0], now_s - (MAX_ENTRIES - 1) * PERIOD_S)
        index = 0
        while at_s <= now_s and len(found) < MAX_ENTRIES:
            while index + 1 < len(known) and known[index + 1][0] <= at_s:
                index += 1
            _, free_pages, groups = known[index]
            found.append([round(at_s, 3), free_pages, *map(list, groups)])
            at_s += PERIOD_S
        return found


class BlockMapLog(EngineEventSink):
    """Has one engine's history, a counter that shows whether anything has changed since a snapshot, and, while there is a watcher,
    the newest `MAX_EVENTS` events since the last `take`. Used on the engine's thread."""

    def __init__(self) -> None:
        self.history = History()
        self.num_changes = 0  # grows whenever a new snapshot may differ from the one before; read from any thread
        self.is_watched = False
        self._events: deque[MapEvent] = deque(maxlen=MAX_EVENTS)
        self._num_added = 0

    def begin(self) -> None:
        """Keep events from now on: there is a watcher."""
        self.is_watched = True

    def end(self) -> None:
        """Keep no events from now on: the last watcher has left."""
        self.is_watched = False
        self.take()

    def take(self) -> tuple[list[MapEvent], int]:
        """Return the events since the last call, and the number of older ones that were dropped."""
        events, num_dropped = list(self._events), self._num_added - len(self._events)
        self._events.clear()
        self._num_added = 0
        return events, num_dropped

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """A request has entered the scheduler's queue."""
        self.num_changes += 1

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """The scheduler has admitted a request; `tokens` by outcome of the prefix cache search."""
        if not self.is_watched:
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
        if self.is_watched:
            processed = 0 if sequence.blocks is None else sequence.blocks.processed
            self._add("preempted", sequence.request.request_id, processed, f"{mode}; {processed} tokens were computed")

    def scheduled(self, plan: StepPlan) -> None:
        """The engine has sent a step's plan to the ranks."""
        self.num_changes += 1

    def stepped(self, rank_times: StepTimings, engine_times: EngineStepTimes) -> None:
        """A step's result has arrived."""
        self.num_changes += 1

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request has ended."""
        self.num_changes += 1
        if self.is_watched:
            self._add("finished", times.request_id, 1, finish_reason)

    def ranks_lost(self) -> None:
        """The engine has lost a rank: the cache is empty."""
        self.num_changes += 1

    def published(self, state: WorkerState) -> None:
        """The engine has published its state, a few times a second and when it becomes idle: add it to the history."""
        self.num_changes += 1
        self.history.add(state.stats)

    def _add(self, kind: str, request_id: str, count: int, detail: str) -> None:
        self._events.append(MapEvent(steady_time_s(), kind, request_id, None, count, detail))
        self._num_added += 1
