"""What happens to each request inside one worker, for `/debug/requests/{id}`, spans and log lines.

Steps cost nothing per token: what goes on for many steps (prefill, decode) is one run, whose figures are differences of the
engine's counters and of the sequence's own length when somebody looks. Called on the engine's thread; read from any.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan
from transom_worker.telemetry.request_timelines import Life, Lives, Step, answer_id_of

LEAST_RUN_S = 1.0  # a run that is older than this
RUN_SHARE = 0.25  # and than this share of the time since it was let in is closed and another begun: dozens, however long it takes


@dataclass(slots=True)
class _Run:
    """Steps of one kind, one after the other: where the counters stood when they began."""

    what: str  # prefill, recompute, decode
    begin_s: float
    num_tokens: int  # computed, or put out, before
    num_steps: int
    num_rows: int
    num_chunks: int = 0  # steps that computed some of a prefill
    num_ahead: int = 0  # steps that were planned behind the last of them, before its token came: the decode run's
    num_rows_ahead: int = 0


class EngineLife(Life):
    """One request at this worker: its steps, and the figures that spans and log lines are made of. 0: not yet."""

    __slots__ = (
        "admitted_s",
        "first_token_s",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "queued_s",
        "run",
        "sequence",
        "tokens",
        "trace_parent",
    )

    def __init__(self, sequence: Sequence, queued_s: float) -> None:
        request = sequence.request
        super().__init__(request.request_id, request.arrival_s or queued_s)
        self.sequence: Sequence | None = sequence  # until the end
        self.trace_parent = request.trace_parent
        self.num_prompt_tokens = request.num_prompt_tokens
        self.queued_s = queued_s
        self.admitted_s = 0.0
        self.first_token_s = 0.0
        self.tokens: Mapping[str, int] = {}  # of the prompt, by outcome
        self.num_preemptions = 0
        self.num_output_tokens = 0
        self.run: _Run | None = None


class Listener(Protocol):
    """Who hears of ended requests, on the engine's thread."""

    def __call__(self, life: EngineLife, reason: str) -> None:
        """A request has ended; returns at once."""

    def close(self) -> None:
        """There will be no more."""


class EngineLives:
    """One engine's. A `SchedulerListener`; `ended` are called with each life when it is over."""

    def __init__(self, worker: str) -> None:
        self.ended: list[Listener] = []
        self._worker = worker
        self._lives = Lives()
        self._running: dict[str, EngineLife] = {}
        self._prefilling: dict[int, EngineLife] = {}  # by sequence id: computing what was known when it was let in
        self._num_known: dict[int, int] = {}  # tokens then
        self._num_steps = 0
        self._num_rows = 0

    # What the scheduler tells

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """See `SchedulerListener`."""
        now_s = time.time()
        life = EngineLife(sequence, now_s)
        facts: dict[str, Any] = {"ahead": num_ahead, "prompt_tokens": life.num_prompt_tokens}
        if sequence.request.resumed_output_ids:
            facts["resumed_tokens"] = len(sequence.request.resumed_output_ids)
        life.add("queued", now_s, **facts)
        self._running[life.request_id] = life
        self._lives.begin(life)

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """See `SchedulerListener`."""
        life = self._running.get(sequence.request.request_id)
        if life is None:
            return
        now_s, is_first = time.time(), not life.admitted_s
        if is_first:
            life.admitted_s, life.tokens = now_s, tokens
        to_compute = len(sequence.token_ids) - sequence.scheduled
        life.add("admitted" if is_first else "admitted_again", now_s, **tokens, to_compute=to_compute)
        self._prefilling[sequence.seq_id] = life
        self._num_known[sequence.seq_id] = len(sequence.token_ids)
        self._begin_run(life, "prefill" if is_first else "recompute", now_s, sequence.scheduled)

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """See `SchedulerListener`."""
        life = self._running.get(sequence.request.request_id)
        if life is None:
            return
        now_s = time.time()
        self._end_run(life, now_s)
        life.num_preemptions += 1
        life.add("preempted", now_s, mode=mode, tokens_lost=sequence.scheduled)
        self._prefilled(sequence.seq_id)

    # What the engine tells

    def scheduled(self, plan: StepPlan) -> None:
        """A plan went to the ranks."""
        self._num_steps += 1
        self._num_rows += len(plan.seq_ids)
        if self._prefilling:
            for seq_id in plan.seq_ids:
                life = self._prefilling.get(seq_id)
                if life is not None and life.run is not None:
                    self._count_prefill_step(life.run, life, len(plan.seq_ids))

    def first_token(self, request_id: str, now_s: float) -> None:
        """A request got its first token here."""
        life = self._running.get(request_id)
        if life is not None:
            life.first_token_s = now_s
            life.add("first_token", now_s)

    def stepped(self) -> None:
        """A step's tokens were taken: prefills that have brought one are over."""
        for seq_id, life in list(self._prefilling.items()) if self._prefilling else ():
            sequence = life.sequence
            if sequence is None or sequence.seq_id != seq_id:
                self._prefilled(seq_id)
            elif len(sequence.token_ids) > self._num_known[seq_id]:
                now_s, prefill = time.time(), life.run
                self._end_run(life, now_s)
                self._prefilled(seq_id)
                decode = self._begin_run(life, "decode", now_s, len(sequence.token_ids) - sequence.num_prompt_tokens)
                if prefill is not None:
                    decode.num_steps -= prefill.num_ahead
                    decode.num_rows -= prefill.num_rows_ahead

    def finished(self, request_id: str, reason: str) -> None:
        """A request ended: stop, length, abort or error."""
        life = self._running.pop(request_id, None)
        if life is None:
            return
        now_s = time.time()
        self._end_run(life, now_s)
        sequence = life.sequence
        if sequence is not None:
            life.num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
            self._prefilled(sequence.seq_id)
        life.sequence = None
        life.add("finished", now_s, reason=reason, output_tokens=life.num_output_tokens)
        self._lives.end(life, now_s)
        for tell in self.ended:
            tell(life, reason)

    def ranks_lost(self) -> None:
        """A rank was lost: no request can go on here."""
        now_s = time.time()
        for life in self._running.values():
            self._end_run(life, now_s)
            life.add("rank_lost", now_s)

    def mark(self) -> None:
        """A few times a second: runs that are long by now are closed, so that a change of pace within a request shows."""
        now_s = time.time()
        for life in self._running.values():
            run = life.run
            if run is not None and now_s - run.begin_s > max(LEAST_RUN_S, RUN_SHARE * (now_s - life.admitted_s)):
                self._end_run(life, now_s)
                self._begin_run(life, run.what, now_s, self._progress(life, run.what))

    def close(self) -> None:
        """Let those who hear of ended requests finish what they do; idempotent."""
        for tell in self.ended:
            tell.close()

    # For whoever asks

    def life_of(self, request_id: str) -> list[dict[str, Any]]:
        """Every step of an answer's choices and attempts here, as JSON values."""
        answer_id, now_s = answer_id_of(request_id), time.time()
        steps = []
        for life in self._lives.of_answer(answer_id):
            assert isinstance(life, EngineLife)
            run = life.run
            going_on = [] if run is None else [self._step_of(life, run, now_s)]
            for step in [*life.all_steps(), *going_on]:
                about = {"worker": self._worker, "request_id": life.request_id}
                steps.append({"at_s": step.at_s, **about, "what": step.what, **step.facts})
        return steps

    # Runs

    def _begin_run(self, life: EngineLife, what: str, now_s: float, num_tokens: int) -> _Run:
        life.run = _Run(what, now_s, num_tokens, self._num_steps, self._num_rows)
        return life.run

    def _count_prefill_step(self, run: _Run, life: EngineLife, num_rows: int) -> None:
        """A plan has a sequence whose prefill is not over: for its prefill, or already for the token after it."""
        sequence = life.sequence
        if sequence is None or sequence.scheduled <= self._num_known[sequence.seq_id]:
            run.num_chunks += 1
        else:
            run.num_ahead += 1
            run.num_rows_ahead += num_rows

    def _end_run(self, life: EngineLife, now_s: float) -> None:
        run, life.run = life.run, None
        if run is not None:
            step = self._step_of(life, run, now_s)
            if step.facts["steps"] or step.facts["tokens"]:
                life.add(step.what, step.at_s, **step.facts)

    def _step_of(self, life: EngineLife, run: _Run, now_s: float) -> Step:
        """What a run has done until now."""
        num_steps = self._num_steps - run.num_steps
        num_tokens = self._progress(life, run.what)
        facts: dict[str, Any] = {
            "seconds": now_s - run.begin_s,
            "tokens": max(0, num_tokens - run.num_tokens),
            "tokens_so_far": num_tokens,
            "steps": num_steps if run.what == "decode" else run.num_chunks,
            "sequences": round((self._num_rows - run.num_rows) / num_steps, 1) if num_steps else 0,
        }
        return Step(run.begin_s, run.what, facts)

    def _progress(self, life: EngineLife, what: str) -> int:
        """Tokens put out so far, or computed so far of what was known when it was let in."""
        sequence = life.sequence
        if sequence is None:
            return life.num_output_tokens
        if what == "decode":
            return len(sequence.token_ids) - sequence.num_prompt_tokens
        return min(sequence.scheduled, self._num_known.get(sequence.seq_id, sequence.scheduled))

    def _prefilled(self, seq_id: int) -> None:
        self._prefilling.pop(seq_id, None)
        self._num_known.pop(seq_id, None)
