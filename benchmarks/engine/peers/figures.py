"""The figures of several engines over several rounds: medians, ratios against a base engine, and a table.

A figure is one row, such as "decode, batch 8 at 512". It holds one value for each engine and round; where an engine failed in a
round, that value is missing. A ratio compares values of the same round, since the machine's speed moves between rounds, and the
median of the rounds' ratios is reported. Above 1 an engine is faster than the base.

    rounds:  vllm 50, 40, 52    transom 150, 128, 104    ratios 3.0, 3.2, 2.0    reported 3.0
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


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

    def as_json(self, base: str) -> dict[str, Any]:
        """The figure as JSON values."""
        return {
            "label": self.label,
            "median": {engine: self.median(engine) for engine in self.values},
            "ratio": {engine: self.ratio(engine, base) for engine in self.values if engine != base},
            "rounds": self.values,
        }


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

    def as_json(self, base: str) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [row.as_json(base) for row in self._rows.values()]


def _cell(row: Figure, engine: str, base: str) -> str:
    median = row.median(engine)
    if median is None:
        return "-"
    ratio = None if engine == base else row.ratio(engine, base)
    return f"{median:,.{row.decimals}f}" + ("" if ratio is None else f" ({ratio:.2f})")
