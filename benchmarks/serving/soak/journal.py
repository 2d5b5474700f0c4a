"""What happens in a soak and when: the journal, one JSON object a line, the report, and the times of disturbances.

Every part of the soak writes into the journal. Its lines are enough to follow a failure: each phase, each disturbance, each answer
that was not whole, each promise that broke.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENDS = "every accepted request ends in tokens or an error"
KINDS = "errors are of promised kinds, and come only where something was disturbed"
TEXTS = "texts and log-probabilities equal those of a calm run of the model that the answer names"
FILES = "each block on the disk is of the model that its folder names"
BAD_BODIES = "a bad request gets the status and the error object that are promised"
WHOLE = "the cluster becomes whole again after every disturbance"
BLOCKS = "no KV block stays in use, and the pool's parts add up"
SUMS = "metrics add up, and equal what clients counted"
MEMORY = "memory of every kind of process is flat"
LEFTOVERS = "no descriptor, thread or process is left over"
PROMISES = (ENDS, KINDS, TEXTS, FILES, BAD_BODIES, WHOLE, BLOCKS, SUMS, MEMORY, LEFTOVERS)
AFTERWARDS_S = 3.0  # a client may see the end of a disturbance late


class Journal:
    """A file of events, and what the report has.

    `broken` has each promise that did not hold, and what was seen. `recoveries` says what was done to which layout, and after how
    many seconds the cluster was whole. `longest_gaps_s` has the longest wait for a token of each stream around disturbances, and
    `growth_mib_per_h` how fast the memory of each kind of process grew in the steady phase.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.recoveries: list[tuple[str, str, float]] = []
        self.longest_gaps_s: list[float] = []
        self.growth_mib_per_h: Mapping[str, float] = {}
        self._begin_s = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)

    @property
    def now_s(self) -> float:
        """Seconds since the journal was opened."""
        return time.monotonic() - self._begin_s

    def note(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"time_s": round(self.now_s, 3), "event": event, **fields}, default=str) + "\n")

    def phase(self, name: str) -> None:
        """Write and print that a phase begins."""
        self.note("phase", name=name)
        print(f"{self.now_s / 60:6.1f} min  {name}", flush=True)

    def count(self, what: str) -> None:
        """Add one to a count of the report without writing a line."""
        self.counts[what] += 1

    def broke(self, promise: str, seen: str, **fields: Any) -> None:
        """Write that a promise did not hold."""
        self.broken.append((promise, seen[:2000]))
        self.note("BROKEN", promise=promise, seen=seen[:2000], **fields)

    def report(self) -> dict[str, Any]:
        """The figures of the soak. `promises`: how often each of them broke."""
        times = Counter(promise for promise, _ in self.broken)
        return {
            "promises": {promise: times[promise] for promise in PROMISES},
            "broken": self.broken,
            "recoveries": self.recoveries,
            "longest_gaps_s": gap_figures(self.longest_gaps_s),
            "growth_mib_per_h": self.growth_mib_per_h,
            "counts": dict(sorted(self.counts.items())),
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def gap_figures(gaps_s: Sequence[float]) -> dict[str, float]:
    """The number of streams, and how long each waited at worst for a token, in seconds."""
    if not gaps_s:
        return {}
    ordered = sorted(gaps_s)
    shares = {f"p{percent}": ordered[len(ordered) * percent // 100] for percent in (50, 90, 99)}
    return {"streams": len(ordered), **shares, "at most": ordered[-1]}


class Windows:
    """All intervals of one kind of disturbance, each from the kill until the cluster is whole again and a little longer.

    One begins after the other has ended, so the end of the last one tells whether any of them reaches into a time.
    """

    def __init__(self) -> None:
        self._end_s = -math.inf  # of the last interval, on `time.monotonic`; infinite while it lasts

    @contextmanager
    def open(self) -> Iterator[None]:
        """An interval that lasts as long as the block."""
        self._end_s = math.inf
        try:
            yield
        finally:
            self._end_s = time.monotonic() + AFTERWARDS_S

    def overlaps(self, begin_s: float) -> bool:
        """Whether one of them overlaps the time from `begin_s` until now."""
        return self._end_s >= begin_s
