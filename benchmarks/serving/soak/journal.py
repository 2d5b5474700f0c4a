"""What happens in a soak and when: the journal, one JSON object a line, the promises that broke, and the times of disturbances.

Every part of the soak writes into it. Its lines are enough to follow a failure: each disturbance, each answer that was not whole,
each promise that broke.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that did not hold, when (seconds since the journal was opened), and what was seen."""

    promise: str
    time_s: float
    seen: str


class Journal:
    """A file of events, counts of them, and the promises that broke."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: list[Broken] = []
        self.counts: Counter[str] = Counter()
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

    def count(self, what: str, number: int = 1) -> None:
        """Add to a count of the report without writing a line."""
        self.counts[what] += number

    def broke(self, promise: str, seen: str, **fields: Any) -> None:
        """Write that a promise did not hold."""
        broken = Broken(promise, round(self.now_s, 3), seen[:2000])
        self.broken.append(broken)
        self.note("BROKEN", **asdict(broken), **fields)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Windows:
    """All intervals of one kind of disturbance, each from the kill until the cluster is whole again and a little longer."""

    def __init__(self) -> None:
        self._windows: list[list[float]] = []  # begin and end on `time.monotonic`; infinite while it lasts

    @contextmanager
    def open(self) -> Iterator[None]:
        """An interval that lasts as long as the block."""
        window = [time.monotonic(), math.inf]
        self._windows.append(window)
        try:
            yield
        finally:
            window[1] = time.monotonic() + AFTERWARDS_S

    def overlaps(self, begin_s: float) -> bool:
        """Whether one of them overlaps the time from `begin_s` until now."""
        now_s = time.monotonic()
        return any(begin <= now_s and end >= begin_s for begin, end in self._windows)
