"""`EngineTimelines`: keeps the timelines of one engine's requests, from which `/debug/requests/{id}`, a worker's spans and its
request log lines are made.

- **timeline**: what happened to one request, in order (`request_timelines`).
- **phase**: consecutive steps of one kind that compute a request. `prefill` computes the tokens that were known at the first
  admission, `recompute` those that were known at a later admission (after a preemption), and `decode` generates tokens.

A phase costs nothing per token. At its beginning the engine's step counters and the sequence's length are noted. At its end, or
when a client asks, the phase's figures are the differences from these. Example: a prompt of 59 tokens with 16 tokens per step
becomes one `prefill` event with `tokens: 59, steps: 4`.

The methods are called on the engine's thread; `events_of` may be called on any thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from transom_core.clock import steady_time_s
from transom_core.telemetry.request_timelines import Timeline, TimelineEvent, TimelineStore, response_id_of
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan, StepTimings
from transom_worker.telemetry.engine_events import EngineEventSink, EngineStepTimes, RequestTimes, WorkerState
from transom_worker.telemetry.transfer_report import FetchReport

Clock = Callable[[], float]
"""Returns the time, in seconds since the epoch."""

LEAST_PHASE_S = 1.0
PHASE_SHARE = 0.25
"""A phase that is longer than both `LEAST_PHASE_S` and this share of the time since the request's admission is ended and continued
as another event. So a change of pace within a request shows, and even a long request has only dozens of events."""


@dataclass(slots=True)
class _Phase:
    """The counters at the beginning of a phase, and the steps that are counted one by one."""

    kind: str  # prefill, recompute or decode
    begin_s: float
    num_known: int  # prefill, recompute: the sequence's tokens at admission, all of which the phase computes
    num_tokens: int  # computed (prefill, recompute) or generated (decode) before the phase
    num_steps: int
    num_rows: int
    num_chunks: int = 0  # steps that computed tokens of a prefill
    # Steps that were planned after a prefill's last step, but before its token had arrived: they belong to the decode phase.
    num_steps_ahead: int = 0
    num_rows_ahead: int = 0


class EngineTimeline(Timeline):
    """One request at this worker: its events, and the figures of its spans and its log line. A time is 0 before the event."""

    __slots__ = (
        "admitted_s", "first_token_s", "num_output_tokens", "num_preemptions", "num_prompt_tokens", "phase", "queued_s",
        "sequence", "tokens", "trace_parent",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, queued_s: float) -> None:
        request = sequence.request
        super().__init__(request.request_id, queued_s, client=request.client)
        self.sequence: Sequence | None = sequence  # None once the request has ended
        self.trace_parent = request.trace_parent
        self.num_prompt_tokens = request.num_prompt_tokens
        self.queued_s = queued_s
        self.admitted_s = 0.0
        self.first_token_s = 0.0
        self.tokens: Mapping[str, int] = {}  # prompt tokens by outcome of the prefix cache search
        self.num_preemptions = 0
        self.num_output_tokens = 0
        self.phase: _Phase | None = None


class EndedTimelineConsumer(Protocol):
    """Consumes the timelines of ended requests. The engine's thread calls it."""

    def export(self, timeline: EngineTimeline, finish_reason: str) -> None:
        """Take the timeline of a request that has ended, and return at once."""

    def close(self) -> None:
        """Finish the exports that were begun; no more timelines follow. Idempotent."""


class EngineTimelines(EngineEventSink):
    """The timelines of one engine's requests. The `exporter`, if there is one, receives each timeline when its request has
    ended."""

    def __init__(self, worker: str, clock: Clock = steady_time_s) -> None:
        self.exporter: EndedTimelineConsumer | None = None
        self._worker = worker
        self._clock = clock
        self._store = TimelineStore()
        self._running: dict[str, EngineTimeline] = {}
        self._prefilling: dict[int, EngineTimeline] = {}  # by sequence id: in the phase prefill or recompute
        self._num_steps = 0
        self._num_rows = 0

    # Events (see `EngineEventSink`)

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """A request has entered the scheduler's queue, after `num_ahead` others."""
        now_s = self._clock()
        timeline = EngineTimeline(sequence, now_s)
        facts: dict[str, Any] = {"ahead": num_ahead, "prompt_tokens": timeline.num_prompt_tokens}
        if sequence.request.resumed_output_ids:
            facts["resumed_tokens"] = len(sequence.request.resumed_output_ids)
        if sequence.request.kv_policy is not None:
            facts["kv_policy"] = sequence.request.kv_policy.text
        timeline.add("queued", now_s, **facts)
        self._running[timeline.request_id] = timeline
        self._store.begin(timeline)

    def prefix_fetched(self, times: RequestTimes, report: FetchReport) -> None:
        """The fetch of a held request's prefix from another worker has ended."""
        timeline = self._running.get(times.request_id)
        if timeline is not None:
            facts: dict[str, Any] = {"source": report.source, "outcome": report.outcome, "seconds": report.seconds}
            if report.num_bytes:
                facts |= {"tokens": report.num_tokens, "blocks": report.num_blocks, "bytes": report.num_bytes}
                facts["wire"] = report.wire
            timeline.add("prefix_fetched", self._clock(), **facts)

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """The scheduler has admitted a request, for the first time or after a preemption; `tokens` by outcome of the cache
        search."""
        timeline = self._running.get(sequence.request.request_id)
        if timeline is None:
            return
        now_s, is_first = self._clock(), not timeline.admitted_s
        if is_first:
            timeline.admitted_s, timeline.tokens = now_s, tokens
        to_compute = len(sequence.token_ids) - sequence.scheduled
        timeline.add("admitted" if is_first else "admitted_again", now_s, **tokens, to_compute=to_compute)
        self._prefilling[sequence.seq_id] = timeline
        kind, num_known = "prefill" if is_first else "recompute", len(sequence.token_ids)
        self._begin_phase(timeline, kind, now_s, num_known=num_known, num_tokens=sequence.scheduled)

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """The scheduler has preempted a request."""
        timeline = self._running.get(sequence.request.request_id)
        if timeline is None:
            return
        now_s = self._clock()
        self._end_phase(timeline, now_s)
        timeline.num_preemptions += 1
        timeline.add("preempted", now_s, mode=mode, tokens_lost=sequence.scheduled)
        self._prefilling.pop(sequence.seq_id, None)

    def scheduled(self, plan: StepPlan) -> None:
        """The engine has sent a plan to the ranks."""
        self._num_steps += 1
        self._num_rows += len(plan.seq_ids)
        if self._prefilling:
            for seq_id in plan.seq_ids:
                timeline = self._prefilling.get(seq_id)
                if timeline is not None and timeline.phase is not None:
                    self._count_prefill_step(timeline.phase, timeline, len(plan.seq_ids))

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        """A request has its first token at this worker."""
        timeline = self._running.get(times.request_id)
        if timeline is not None:
            timeline.first_token_s = now_s
            timeline.add("first_token", now_s)

    def stepped(self, rank_times: StepTimings, engine_times: EngineStepTimes) -> None:
        """The engine has applied a step's tokens. A prefill that has brought a token is over, and decode begins."""
        for seq_id, timeline in list(self._prefilling.items()) if self._prefilling else ():
            sequence, prefill = timeline.sequence, timeline.phase
            if sequence is None or prefill is None or sequence.seq_id != seq_id:
                del self._prefilling[seq_id]
            elif len(sequence.token_ids) > prefill.num_known:
                now_s = self._clock()
                self._end_phase(timeline, now_s)
                del self._prefilling[seq_id]
                num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
                decode = self._begin_phase(timeline, "decode", now_s, num_known=0, num_tokens=num_generated)
                decode.num_steps -= prefill.num_steps_ahead
                decode.num_rows -= prefill.num_rows_ahead

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request has ended: stop, length, abort, error or handover."""
        timeline = self._running.pop(times.request_id, None)
        if timeline is None:
            return
        now_s = self._clock()
        self._end_phase(timeline, now_s)
        if timeline.sequence is not None:
            self._prefilling.pop(timeline.sequence.seq_id, None)
        timeline.num_output_tokens = num_output_tokens
        timeline.sequence = None
        timeline.add("finished", now_s, reason=finish_reason, output_tokens=num_output_tokens)
        self._store.end(timeline, now_s)
        if self.exporter is not None:
            self.exporter.export(timeline, finish_reason)

    def ranks_lost(self) -> None:
        """The engine has lost a rank: every request ends here."""
        now_s = self._clock()
        for timeline in self._running.values():
            self._end_phase(timeline, now_s)
            timeline.add("rank_lost", now_s)

    def published(self, state: WorkerState) -> None:
        """A fraction of a second has passed: end phases that are long by now, and continue them as another event
        (`PHASE_SHARE`)."""
        now_s = self._clock()
        for timeline in self._running.values():
            phase = timeline.phase
            if phase is None:
                continue
            if now_s - phase.begin_s > max(LEAST_PHASE_S, PHASE_SHARE * (now_s - timeline.admitted_s)):
                self._end_phase(timeline, now_s)
                num_tokens = _num_tokens_now(timeline, phase)
                self._begin_phase(timeline, phase.kind, now_s, num_known=phase.num_known, num_tokens=num_tokens)

    def close(self) -> None:
        """Let the exporter complete what it has begun; idempotent."""
        if self.exporter is not None:
            self.exporter.close()

    # What a client asks

    def events_of(self, request_id: str) -> list[dict[str, Any]]:
        """Return every event of all choices and attempts of a response at this worker, as JSON values; a running phase counts up to
        now. `ago_s` is how long ago an event was, which means the same on a host with another clock."""
        now_s = self._clock()
        found = []
        for timeline in self._store.of_response(response_id_of(request_id)):
            assert isinstance(timeline, EngineTimeline)
            phase = timeline.phase
            running = [] if phase is None else [self._phase_event(timeline, phase, now_s)]
            for event in [*timeline.events, *running]:
                about = {"worker": self._worker, "request_id": timeline.request_id}
                found.append(
                    {"at_s": event.at_s, "ago_s": now_s - event.at_s, **about, "what": event.kind, **event.facts}
                )
        return found

    # Phases

    def _begin_phase(
        self, timeline: EngineTimeline, kind: str, now_s: float, *, num_known: int, num_tokens: int
    ) -> _Phase:
        timeline.phase = _Phase(kind, now_s, num_known, num_tokens, self._num_steps, self._num_rows)
        return timeline.phase

    def _count_prefill_step(self, phase: _Phase, timeline: EngineTimeline, num_rows: int) -> None:
        """Count a plan with a sequence in prefill: the plan computes a chunk of the prefill, or already the token after it."""
        sequence = timeline.sequence
        if sequence is None or sequence.scheduled <= phase.num_known:
            phase.num_chunks += 1
        else:
            phase.num_steps_ahead += 1
            phase.num_rows_ahead += num_rows

    def _end_phase(self, timeline: EngineTimeline, now_s: float) -> None:
        phase, timeline.phase = timeline.phase, None
        if phase is not None:
            event = self._phase_event(timeline, phase, now_s)
            if event.facts["steps"] or event.facts["tokens"]:
                timeline.add(event.kind, event.at_s, **event.facts)

    def _phase_event(self, timeline: EngineTimeline, phase: _Phase, now_s: float) -> TimelineEvent:
        """Return the event of a phase, with what it has done so far."""
        num_steps = self._num_steps - phase.num_steps
        num_tokens = _num_tokens_now(timeline, phase)
        facts: dict[str, Any] = {
            "seconds": now_s - phase.begin_s,
            "tokens": max(0, num_tokens - phase.num_tokens),
            "tokens_so_far": num_tokens,
            "steps": num_steps if phase.kind == "decode" else phase.num_chunks,
            "sequences": round((self._num_rows - phase.num_rows) / num_steps, 1) if num_steps else 0,
        }
        return TimelineEvent(phase.begin_s, phase.kind, facts | _kept(timeline))


def _num_tokens_now(timeline: EngineTimeline, phase: _Phase) -> int:
    """Return how many tokens are generated (decode), or how many of those known at admission are computed (prefill, recompute)."""
    sequence = timeline.sequence
    if sequence is None:
        return timeline.num_output_tokens
    if phase.kind == "decode":
        return len(sequence.token_ids) - sequence.num_prompt_tokens
    return min(sequence.scheduled, phase.num_known)


def _kept(timeline: EngineTimeline) -> dict[str, int]:
    """Return what a KV policy keeps of a request now: its blocks, the tokens of its window without sink blocks, and how many blocks
    it has dropped."""
    blocks = None if timeline.sequence is None else timeline.sequence.blocks
    if timeline.sequence is None or blocks is None or timeline.sequence.request.kv_policy is None:
        return {}
    tables = zip(timeline.sequence.retentions, blocks.tables, strict=True)
    return {
        "kept_blocks": sum(len(table.sink_blocks) + len(table.run) for table in blocks.tables),
        "window_tokens": sum(len(table.run) * retention.block_size for retention, table in tables),
        "dropped_blocks": blocks.num_dropped,
    }
