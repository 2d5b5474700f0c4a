"""The figures of a soak as JSON and as a page of Markdown."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.soak.journal import PROMISES, Journal
from benchmarks.serving.soak.process_watch import Growth


@dataclass(slots=True, kw_only=True)
class Report:
    """What a soak has measured. `growth` is of the steady phase, in which no process was killed.

    `sums`: phase -> what was counted -> the server's count, and the least and the most that fit what clients counted.
    """

    setup: dict[str, Any]
    phases_s: dict[str, float] = field(default_factory=dict)
    recoveries: list[tuple[str, str, float]] = field(default_factory=list)
    longest_gaps_s: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    growth: list[Growth] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def write(self, path: Path, journal: Journal) -> None:
        """Write `path` (JSON) and the same name with .md."""
        broken = [asdict(one) for one in journal.broken]
        figures = {**asdict(self), "counts": dict(sorted(journal.counts.items())), "broken": broken}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
        path.with_suffix(".md").write_text("\n".join(self._lines(journal)) + "\n")

    def _lines(self, journal: Journal) -> Iterable[str]:
        yield f"# Soak of {sum(self.phases_s.values()) / 60:.0f} minutes\n"
        yield ", ".join(f"{name} {value}" for name, value in self.setup.items()) + "\n"
        yield from _table(("promise", "broken"), [(name, _times(journal, name)) for name in PROMISES])
        for one in journal.broken[:50]:
            yield f"- {one.time_s:.1f} s: {one.promise}: {one.seen[:500]}"
        yield ""
        yield from _table(("phase", "minutes"), [(name, f"{value / 60:.1f}") for name, value in self.phases_s.items()])
        yield from _table(("what", "times"), sorted(journal.counts.items()))
        yield from _table(("disturbance", "times", "median s until whole", "longest"), recovery_rows(self.recoveries))
        figures = ", ".join(f"{name} {value:.1f}" for name, value in self.longest_gaps_s.items())
        yield f"Longest wait of each stream around kills for its next token, in seconds: {figures or 'none'}.\n"
        rows = [
            (one.kind, one.num_processes, f"{one.observed_h:.2f}", f"{one.rss_mib:.0f}",
             f"{one.rss_mib_per_h:+.1f}", f"{one.pss_mib_per_h:+.1f}")
            for one in self.growth
        ]  # fmt: skip
        yield "Memory in the steady phase:\n"
        yield from _table(("process", "number", "hours seen", "resident MiB", "RSS MiB/h", "PSS MiB/h"), rows)
        for phase, sums in self.sums.items():
            counts = [(name, *(f"{value:.0f}" for value in values)) for name, values in sums.items()]
            yield from _table((f"sums, {phase}", "server", "clients, at least", "at most"), counts)
        yield "Left over: " + ("; ".join(self.leftovers) or "nothing") + "."


def gap_figures(gaps_s: Sequence[float]) -> dict[str, float]:
    """The number of streams, and how long each waited at worst for a token, in seconds."""
    if not gaps_s:
        return {}
    ordered = sorted(gaps_s)
    shares = {f"p{percent}": ordered[len(ordered) * percent // 100] for percent in (50, 90, 99)}
    return {"streams": len(ordered), **shares, "at most": ordered[-1]}


def recovery_rows(recoveries: Sequence[tuple[str, str, float]]) -> list[tuple[Any, ...]]:
    """How often each kind of disturbance came, and how long it took until the cluster was whole."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, layout, took_s in recoveries:
        kinds[name if name.startswith("redeploy") else f"{name}, {layout}"].append(took_s)
    return [
        (name, len(times), f"{statistics.median(times):.1f}", f"{max(times):.1f}")
        for name, times in sorted(kinds.items())
    ]


def _times(journal: Journal, promise: str) -> str:
    count = sum(one.promise == promise for one in journal.broken)
    return f"**{count} times**" if count else "never"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""
