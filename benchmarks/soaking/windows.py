"""Intervals of time in which something was disturbed, from the kill until the cluster is whole again and a little longer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

AFTERWARDS_S = 3.0  # a client may see the end of a disturbance late


@dataclass(slots=True)
class Window:
    """One interval on `time.monotonic`; `end_s` is infinite while it lasts."""

    begin_s: float
    end_s: float = math.inf


class Windows:
    """All intervals of one kind of disturbance."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """An interval that lasts as long as the block."""
        window = Window(time.monotonic())
        self._windows.append(window)
        try:
            yield
        finally:
            window.end_s = time.monotonic() + AFTERWARDS_S

    def overlaps(self, begin_s: float) -> bool:
        """Whether one of them overlaps the time from `begin_s` until now."""
        now_s = time.monotonic()
        return any(window.begin_s <= now_s and window.end_s >= begin_s for window in self._windows)
