"""The figures of a soak as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.soak.journal import PROMISES, Journal
from benchmarks.serving.soak.process_watch import Growth


@dataclass(slots=True, kw_only=True)
class Report:
    """What a soak has measured. `growth` is of the steady phase, in which no process was killed.

    `sums`: phase -> what was counted -> the server's count, and the least and the most that fit what clients counted. `recoveries`:
    what was done to which layout, and after how many seconds the cluster was whole.
    """

    setup: dict[str, Any]
    phases_s: dict[str, float] = field(default_factory=dict)
    recoveries: list[tuple[str, str, float]] = field(default_factory=list)
    longest_gaps_s: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    growth: list[Growth] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def write(self, path: Path, journal: Journal) -> None:
        """Write `path`. `promises`: how often each of them broke."""
        times = {name: sum(one.promise == name for one in journal.broken) for name in PROMISES}
        found = {"promises": times, "broken": [asdict(one) for one in journal.broken]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**found, **asdict(self), "counts": dict(sorted(journal.counts.items()))}, indent=2))


def gap_figures(gaps_s: Sequence[float]) -> dict[str, float]:
    """The number of streams, and how long each waited at worst for a token, in seconds."""
    if not gaps_s:
        return {}
    ordered = sorted(gaps_s)
    shares = {f"p{percent}": ordered[len(ordered) * percent // 100] for percent in (50, 90, 99)}
    return {"streams": len(ordered), **shares, "at most": ordered[-1]}
