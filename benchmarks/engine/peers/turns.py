"""Takes the figures of several engines in turns; all of them stay loaded.

A round takes each figure once from every engine, in an order that rotates from round to round. A failure is printed, leaves a gap
in the table, and the run goes on.

A figure is one row, such as "decode, batch 8 at 512". It holds one value for each engine and round; where an engine failed in a
round, that value is missing. A ratio compares values of the same round, since the machine's speed moves between rounds, and the
median of the rounds' ratios is reported. Above 1 an engine is faster than the base.

    rounds:  vllm 50, 40, 52    transom 150, 128, 104    ratios 3.0, 3.2, 2.0    reported 3.0
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from benchmarks.engine.peers.engine import Engine, RunningEngine
from benchmarks.json_child import ChildError

PAUSE_S = 0.5  # between engines, in which the threads of the one before stop spinning
Figure = Mapping[str, Mapping[int, float]]  # engine -> round -> tokens per second
Found = TypeVar("Found")


class Bench:
    """Takes figures of some engines. `figures`: label -> figure; `failures`: what went wrong."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, dict[int, float]]] = {}
        self.failures: list[str] = []

    def run(
        self, engines: Sequence[Engine], measures: Mapping[str, Callable[[RunningEngine], float]], num_rounds: int
    ) -> None:
        """Load all engines, and take each figure in turns. `measures`: label -> how it is taken."""
        running: dict[str, RunningEngine] = {}
        try:
            for engine in engines:
                say(f"{engine.name}: loading")
                if loaded := self._attempt(engine.name, "load", lambda engine=engine: RunningEngine(engine)):
                    running[engine.name] = loaded
                    say(f"{engine.name}: {loaded.version}, bfloat16")
            for label, measure in measures.items():
                self.figures[label] = defaultdict(dict)
                for number in range(num_rounds):
                    self._round(label, number, measure, running)
        finally:
            for one in running.values():
                one.stop()

    def _round(
        self, label: str, number: int, measure: Callable[[RunningEngine], float], running: Mapping[str, RunningEngine]
    ) -> None:
        names = list(running)
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            time.sleep(PAUSE_S)
            value = self._attempt(name, label, lambda name=name: measure(running[name]))
            if value is not None:
                self.figures[label][name][number] = value
                say(f"{label}, round {number + 1}: {name} {value:,.1f} tokens/s")

    def _attempt(self, name: str, what: str, function: Callable[[], Found]) -> Found | None:
        try:
            return function()
        except (ChildError, OSError) as error:
            self.failures.append(f"{name}, {what}: {error}")
            say(f"FAILED {self.failures[-1]}")
            return None


def table(figures: Mapping[str, Figure], engines: Sequence[str], base: str) -> Iterator[str]:
    """Lines of a Markdown table: the median, and in brackets the ratio against the base."""
    yield "| | " + " | ".join(engines) + " |"
    yield "|---|" + "---|" * len(engines)
    for label, figure in figures.items():
        yield f"| {label}, tokens/s | " + " | ".join(cell(figure, engine, base) for engine in engines) + " |"


def cell(figure: Figure, engine: str, base: str) -> str:
    """An engine's median, and how many times as good as the base it is in the rounds in which both gave a value."""
    ours, theirs = figure.get(engine, {}), figure.get(base, {})
    if not ours:
        return "-"
    ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
    median = f"{statistics.median(ours.values()):,.1f}"
    return median if engine == base or not ratios else f"{median} ({statistics.median(ratios):.2f})"


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
