"""Takes the figures of several engines in turns; all of them stay loaded.

A round takes each figure once from every engine, in an order that rotates from round to round. A failure is printed, leaves a gap
in the table, and the run goes on.

A figure is one row, such as "decode, batch 8 at 512". It holds one value for each engine and round; where an engine failed in a
round, that value is missing. A ratio compares values of the same round, since the machine's speed moves between rounds, and the
median of the rounds' ratios is reported. Above 1 an engine is faster than the base.

    rounds:  vllm 50, 40, 52    transom 150, 128, 104    ratios 3.0, 3.2, 2.0    reported 3.0
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.engine.peers.engine import ChildRun, Engine
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


@dataclass(slots=True)
class Figure:
    """One row of the table, in tokens per second."""

    label: str
    decimals: int = 1
    values: dict[str, dict[int, float]] = field(default_factory=dict)  # by engine and round

    def add(self, engine: str, number: int, value: float | None) -> None:
        """Add the value of one round, counted from 0; None where the engine failed."""
        if value is not None:
            self.values.setdefault(engine, {})[number] = value

    def median(self, engine: str) -> float | None:
        """The median of all rounds that gave a value."""
        found = self.values.get(engine)
        return statistics.median(found.values()) if found else None

    def ratio(self, engine: str, base: str) -> float | None:
        """How many times as good as the base: the median over the rounds in which both gave a value."""
        ours, theirs = self.values.get(engine, {}), self.values.get(base, {})
        pairs = [(ours[number], theirs[number]) for number in ours.keys() & theirs.keys()]
        ratios = [a / b for a, b in pairs if a and b]
        return statistics.median(ratios) if ratios else None


class Figures:
    """All rows, in the order in which they were first asked for."""

    def __init__(self) -> None:
        self._rows: dict[str, Figure] = {}

    def row(self, label: str, *, decimals: int = 1) -> Figure:
        """The row of this label, new if there is none."""
        return self._rows.setdefault(label, Figure(label, decimals))

    def table(self, engines: list[str], base: str) -> list[str]:
        """Lines of a Markdown table: the median, and in brackets the ratio against the base."""
        lines = ["| | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
        for row in self._rows.values():
            cells = [_cell(row, engine, base) for engine in engines]
            lines.append(f"| {row.label}, tokens/s | " + " | ".join(cells) + " |")
        return lines


def _cell(row: Figure, engine: str, base: str) -> str:
    median = row.median(engine)
    if median is None:
        return "-"
    ratio = None if engine == base else row.ratio(engine, base)
    return f"{median:,.{row.decimals}f}" + ("" if ratio is None else f" ({ratio:.2f})")


class Bench:
    """Takes the figures of some engines."""

    def __init__(self, engines: list[Engine], plan: Plan) -> None:
        self.engines, self.plan = engines, plan
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
