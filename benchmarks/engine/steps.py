"""An engine whose steps a benchmark runs itself."""

import itertools
from collections.abc import Iterable

from transom_core.contract import OutputEvent, Request, SamplingParams
from transom_worker.engine.engine import Engine

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Steps:
    """One engine and the sequences that it decodes. Only this object steps the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._names, self._numbers = engine, set[str](), itertools.count()

    def add(self, prompt: Iterable[int], params: SamplingParams = ENDLESS, *, salt: str | None = None) -> str:
        """Add a request, whose name it returns; without a salt it finds nothing in the prefix cache."""
        name = f"request-{next(self._numbers)}"
        self.engine.add(
            Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, seed=0, cache_salt=salt or name)
        )
        self._names.add(name)
        return name

    def until_started(self) -> None:
        """Step until every sequence has a token."""
        waiting = set(self._names)
        while waiting:
            waiting -= {event.request_id for event in self.step() if event.token_ids}

    def step(self) -> list[OutputEvent]:
        """The events of one step. A step that failed ends the engine and tells its requests so."""
        events: list[OutputEvent] = []
        events += self.engine.step(events.extend)
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"{event.request_id}: {event.error}")
        return events

    def tokens(self, steps: int) -> int:
        """Run this many steps, and return the number of tokens that they bring."""
        return sum(len(event.token_ids) for _ in range(steps) for event in self.step())

    def to_the_end(self) -> list[OutputEvent]:
        """Step until nothing is left to do."""
        events = []
        while self.engine.has_work:
            events += self.step()
        self._names.clear()
        return events

    def stop(self) -> None:
        """Drop every sequence."""
        for name in self._names:
            self.engine.abort(name)
        self.to_the_end()
