"""What the live block map keeps of an engine's events. While no watcher is connected, an event costs one addition."""

from __future__ import annotations

from collections.abc import Mapping

from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan, StepTimings
from transom_worker.telemetry.blockmap.events import EventLog
from transom_worker.telemetry.blockmap.history import History
from transom_worker.telemetry.engine_events import EngineEventSink, EngineStepTimes, RequestTimes
from transom_worker.telemetry.worker_state import WorkerState


class BlockMapLog(EngineEventSink):
    """One engine's history and newest events, and a counter that tells whether anything has changed since a snapshot."""

    def __init__(self) -> None:
        self.history = History()
        self.events = EventLog()
        self.num_changes = 0  # grows whenever a new snapshot may differ from the one before; read from any thread

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """A request has entered the scheduler's queue."""
        self.num_changes += 1

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """The scheduler has admitted a request; `tokens` by outcome of the prefix cache search."""
        self.events.admitted(sequence, tokens=tokens)

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """The scheduler preempts a request."""
        self.events.preempted(sequence, mode=mode)

    def scheduled(self, plan: StepPlan) -> None:
        """The engine has sent a step's plan to the ranks."""
        self.num_changes += 1

    def stepped(self, rank_times: StepTimings, engine_times: EngineStepTimes) -> None:
        """A step's result has arrived."""
        self.num_changes += 1

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request has ended."""
        self.num_changes += 1
        self.events.finished(times.request_id, finish_reason)

    def ranks_lost(self) -> None:
        """The engine has lost a rank: the cache is empty."""
        self.num_changes += 1

    def published(self, state: WorkerState) -> None:
        """A fraction of a second has passed, or the engine becomes idle."""
        self.num_changes += 1
        self.history.add(state.stats)
