"""Shows the stages of a server's start on standard error: a spinner if it is a terminal, and a line for each finished stage."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class StartupProgress:
    """Shows the current stage, and prints its duration when it ends."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = self._console.status("") if sys.stderr.isatty() else None
        self._stage: str | None = None
        self._since_s = 0.0

    def stage(self, name: str) -> None:
        """Begin the next stage, which ends the current one."""
        self._finish()
        self._stage, self._since_s = name, time.perf_counter()
        if self._status is not None:
            self._status.update(f"{name} ...")

    def __enter__(self) -> StartupProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        if self._stage is not None:
            self._console.print(f"  {self._stage}: {time.perf_counter() - self._since_s:.1f} s")
        self._stage = None
