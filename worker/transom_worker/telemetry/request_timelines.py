"""What happened to the last requests of one process, step by step: bounded memory, and neither prompts nor text.

Routers and workers keep one such book each; `/debug/requests/{id}` puts them together. One thread writes, any may read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_LIVES = 2000
MAX_STEPS = 200  # of one request; those in the middle are summed up from then on
MAX_FINISHED_STEPS = 40_000  # of all finished requests together: about 14 MB
_NUM_FIRST = 50  # steps that a long life keeps from its beginning
_NUM_SUMMED = 50  # steps that are summed up at once

_ATTEMPT = re.compile(r"(.+)-(\d+)-(\d+)(?:\+\d+)?")


def answer_id_of(request_id: str) -> str:
    """The id that the client saw: workers know requests as `{answer}-{prompt}-{choice}`, with `+{attempt}` where they went on."""
    match = _ATTEMPT.fullmatch(request_id)
    return match[1] if match else request_id


def place_of(request_id: str) -> tuple[int, int] | None:
    """Which prompt of its answer, and which choice of that prompt, a worker's request is; None where its id does not say."""
    match = _ATTEMPT.fullmatch(request_id)
    return (int(match[2]), int(match[3])) if match else None


class Step(NamedTuple):
    """Something that happened, in seconds since the epoch, with figures as JSON has them."""

    at_s: float
    what: str
    facts: dict[str, Any]


class Life:
    """One request's steps, the first ones and the last."""

    __slots__ = ("arrival_s", "end_s", "request_id", "steps")

    def __init__(self, request_id: str, arrival_s: float) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.end_s = 0.0  # 0 while it runs
        self.steps: list[Step] = []

    def add(self, what: str, at_s: float | None = None, **facts: Any) -> None:
        """Note a step, by default as of now; nothing is noted after the end."""
        if self.end_s:
            return
        self.steps.append(Step(time.time() if at_s is None else at_s, what, facts))
        if len(self.steps) > MAX_STEPS:
            self._sum_up()

    def all_steps(self) -> list[Step]:
        """All steps, and what goes on as it stands now; from any thread."""
        return list(self.steps)

    def _sum_up(self) -> None:
        middle = self.steps[_NUM_FIRST : _NUM_FIRST + _NUM_SUMMED]
        facts = {
            "steps": sum(step.facts["steps"] if step.what == "summed_up" else 1 for step in middle),
            "tokens": sum(step.facts.get("tokens", 0) for step in middle),
            "until_s": middle[-1].at_s,
        }
        self.steps[_NUM_FIRST : _NUM_FIRST + _NUM_SUMMED] = [Step(middle[0].at_s, "summed_up", facts)]


class Lives:
    """A ring: the oldest finished life makes room for a new one, and the oldest of all where none has finished."""

    def __init__(self, *, max_lives: int = MAX_LIVES, max_finished_steps: int = MAX_FINISHED_STEPS) -> None:
        self._max_lives = max_lives
        self._max_finished_steps = max_finished_steps
        self._running: dict[str, Life] = {}  # by request id, in order of arrival
        self._finished: dict[str, Life] = {}  # in order of their ends
        self._num_finished_steps = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def begin(self, life: Life) -> None:
        """A request has come. One of an id that was there before replaces it."""
        self._forget(life.request_id)
        self._running.pop(life.request_id, None)
        self._running[life.request_id] = life
        if len(self) > self._max_lives:
            oldest = next(iter(self._finished or self._running))
            self._forget(oldest)
            if len(self) > self._max_lives:
                self._running.pop(oldest)

    def end(self, life: Life, at_s: float | None = None) -> None:
        """A request has ended; its life stays for a while."""
        life.end_s = time.time() if at_s is None else at_s
        if self._running.get(life.request_id) is not life:
            return
        del self._running[life.request_id]
        self._finished[life.request_id] = life
        self._num_finished_steps += len(life.steps)
        while self._num_finished_steps > self._max_finished_steps:
            self._forget(next(iter(self._finished)))

    def running(self) -> list[Life]:
        """Those that have not ended, the oldest first."""
        return list(self._running.values())

    def of_answer(self, answer_id: str) -> list[Life]:
        """All choices and attempts of one HTTP request that are known here."""
        return [life for life in self._all() if answer_id_of(life.request_id) == answer_id]

    def newest(self) -> Iterator[Life]:
        """Running ones, then finished ones, the newest first each."""
        yield from reversed(self.running())
        yield from reversed(list(self._finished.values()))

    def _all(self) -> list[Life]:
        return [*list(self._running.values()), *list(self._finished.values())]

    def _forget(self, request_id: str) -> None:
        life = self._finished.pop(request_id, None)
        if life is not None:
            self._num_finished_steps -= len(life.steps)
