"""Shows the log lines of all processes of `transom serve --log-format json` on the command's standard error, one JSON object a
line.

Ray writes each process's standard error to a file in its session folder. If Ray itself showed these lines, it would put a prefix
before each one, which makes it invalid JSON.
"""

import contextlib
import sys
import threading
from pathlib import Path
from typing import TextIO

POLL_PERIOD_S = 0.25  # how often the files are read
MAX_READ_BYTES = 1 << 20  # per read of one file
OWN_PREFIX = b'{"time": '


class LogFollower:
    """Copies new lines of the files in a session's log folder to `out`, on a thread, until it is closed. It skips lines that are
    not Transom's JSON."""

    def __init__(
        self,
        folder: Path,
        out: TextIO | None = None,
        *,
        poll_period_s: float = POLL_PERIOD_S,
        max_read_bytes: int = MAX_READ_BYTES,
    ) -> None:
        self._folder = folder
        self._out = out or sys.stderr
        self._poll_period_s = poll_period_s
        self._max_read_bytes = max_read_bytes
        self._num_read_bytes: dict[Path, int] = {}  # by file; always up to the end of a line
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transom-logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show all lines that were written so far, and stop. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            while not self._closed.wait(self._poll_period_s):
                self.show_new_lines()
            self.show_new_lines()

    def show_new_lines(self) -> None:
        """Copy the lines that were written since the last call."""
        for path in sorted(self._folder.glob("worker-*.err")):
            while lines := self._new_lines(path):
                own = [line for line in lines if line.startswith(OWN_PREFIX)]
                if own:
                    self._out.write(b"".join(own).decode(errors="replace"))
                    self._out.flush()

    def _new_lines(self, path: Path) -> list[bytes]:
        """Return the whole lines that were written to a file since the last call, at most `max_read_bytes` bytes."""
        begin = self._num_read_bytes.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read(self._max_read_bytes)
        except OSError:  # the file was deleted
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == self._max_read_bytes:  # a line longer than one read is not Transom's
            end = len(data)
        self._num_read_bytes[path] = begin + end
        return data[:end].splitlines(keepends=True)
