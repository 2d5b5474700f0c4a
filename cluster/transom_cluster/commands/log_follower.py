"""Shows what the processes of `transom serve --log-format json` write, on its own standard error, one JSON object a line.

Ray keeps each process's standard error in a file of its session, and would otherwise show it with words of its own in front.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import TextIO

PERIOD_S = 0.25
MAX_READ_BYTES = 1 << 20  # of one file at a time
OURS = b'{"time": '


class LogFollower:
    """Reads a session's files until it is closed. Lines that are not ours stay where they are."""

    def __init__(self, folder: Path, out: TextIO | None = None) -> None:
        self._folder = folder
        self._out = out or sys.stderr
        self._read: dict[Path, int] = {}  # bytes, up to the end of a line
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transom-logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show what was written so far, and read no more. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            while not self._closed.wait(PERIOD_S):
                self._show()
            self._show()

    def _show(self) -> None:
        for path in sorted(self._folder.glob("worker-*.err")):
            while lines := self._new_lines(path):
                ours = [line for line in lines if line.startswith(OURS)]
                if ours:
                    self._out.write(b"".join(ours).decode(errors="replace"))
                    self._out.flush()

    def _new_lines(self, path: Path) -> list[bytes]:
        """Whole lines since the last call."""
        begin = self._read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(MAX_READ_BYTES)
        except OSError:  # gone
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == MAX_READ_BYTES:  # a line without an end is none of ours
            end = len(data)
        self._read[path] = begin + end
        return data[:end].splitlines(keepends=True)
