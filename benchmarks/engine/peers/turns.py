"""Takes the figures of several engines in turns; all of them stay loaded.

A round takes each figure once from every engine, in an order that rotates from round to round. A failure is printed, leaves a gap
in the table, and the run goes on.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.engine.peers.engine import ChildRun, Engine
from benchmarks.engine.peers.figures import Figure, Figures
from benchmarks.json_child import ChildError

Item = TypeVar("Item")
Found = TypeVar("Found")

FAILURES = (ChildError, RuntimeError, ValueError, OSError, subprocess.SubprocessError)
PAUSE_S = 0.5  # between engines, in which the threads of the one before stop spinning


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. A decode case is (batch, context, steps)."""

    rounds: int
    sections: tuple[str, ...]
    prefill_tokens: int
    decode: tuple[tuple[int, int, int], ...]


class Bench:
    """Takes the figures of some engines. `on_progress` is called after each decode case."""

    def __init__(self, engines: list[Engine], plan: Plan, *, on_progress: Callable[[], None]) -> None:
        self.engines, self.plan, self._on_progress = engines, plan, on_progress
        self.figures = Figures()
        self.failures: list[str] = []

    def run(self) -> None:
        """Load all engines, and take each case in turns."""
        runs: dict[str, ChildRun] = {}
        try:
            for engine in self.engines:
                say(f"{engine.name}: loading")
                run = self._attempt(engine.name, "load", engine.offline)
                if run is not None:
                    runs[engine.name] = run
            if "prefill" in self.plan.sections:
                self._prefill(runs)
            if "decode" in self.plan.sections:
                for case in self.plan.decode:
                    self._decode(runs, *case)
                    self._on_progress()
        finally:
            for run in runs.values():
                run.stop()

    def _prefill(self, runs: dict[str, ChildRun]) -> None:
        tokens = self.plan.prefill_tokens
        row = self.figures.row(f"prefill {tokens}", decimals=0)
        self._turns(runs, row, lambda run: run.prefill(tokens))

    def _decode(self, runs: dict[str, ChildRun], batch: int, context: int, steps: int) -> None:
        row = self.figures.row(f"decode, batch {batch} at {context} to {context + steps}")
        self._turns(runs, row, lambda run: run.decode(batch, context, steps))

    def _turns(self, runs: dict[str, ChildRun], row: Figure, measure: Callable[[ChildRun], float]) -> None:
        """Take one figure from every engine, in every round."""
        for number in range(self.plan.rounds):
            for name in rotated(list(runs), number):
                time.sleep(PAUSE_S)
                value = self._attempt(name, row.label, lambda run=runs[name]: measure(run))
                row.add(name, number, value)
                said = "failed" if value is None else f"{value:,.1f} tokens/s"
                say(f"{row.label}, round {number + 1}: {name} {said}")

    def _attempt(self, name: str, what: str, function: Callable[[], Found]) -> Found | None:
        try:
            return function()
        except FAILURES as error:
            self.failures.append(f"{name}, {what}: {error}")
            say(f"FAILED {self.failures[-1]}")
            return None


def rotated(items: list[Item], number: int) -> list[Item]:
    """The items in the order of this round: each begins in turn."""
    return items[number % len(items) :] + items[: number % len(items)] if items else []


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
