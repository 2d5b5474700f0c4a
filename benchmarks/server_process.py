"""A server that runs for a benchmark or a script: a process that leads a session of its own, its log, and all that it starts.

    with start_server("smollm2", replicas=2) as server:
        httpx.get(f"{server.url}/v1/models")

The processes of a server are all of its session and all descendants, so Ray's processes count too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.free_ports import free_port
from transom_cluster.commands.process_tree import is_running

READY = "Press Ctrl-C to stop"  # in the log of `transom serve` when it serves
# Ray gives its own processes 30 s to start, of which a full machine may make too little: then the server is started again.
RAY_WAS_LATE, STARTS = "timed out during startup", 6
START_TIMEOUT_S = 400.0
LOOK_S = 0.05
STOP_TIMEOUT_S = 60.0
LAST_CHARACTERS = 3000  # of the log, in the message of an error


class ServerError(RuntimeError):
    """The server ended, or was not ready in time."""


class ServerProcess:
    """One running server. A context manager that stops it."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] = {}) -> None:
        """Start it with these environment variables beside those of this process."""
        self._name = Path(command[0]).name
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115, removed with this object
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `is_ready()`.

        Raises:
            ServerError: it ended before that, or was not ready within `timeout_s`; the message has the end of the log.
        """
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            self.check()
            if is_ready():
                return
            time.sleep(LOOK_S)
        raise ServerError(f"{self._name} is not ready after {timeout_s:.0f} s: {self.log_text()[-LAST_CHARACTERS:]}")

    def check(self) -> None:
        """Raise ServerError with the end of the log if the server has ended."""
        if (code := self.process.poll()) is not None:
            raise ServerError(f"{self._name} has ended with code {code}: {self.log_text()[-LAST_CHARACTERS:]}")

    def log_text(self) -> str:
        """What the server has printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Its living processes."""
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(self.pid).children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == self.pid:
                    found.add(process)
        return list(filter(is_running, found))

    def stop(
        self, timeout_s: float = STOP_TIMEOUT_S, number: signal.Signals = signal.SIGTERM
    ) -> tuple[int, list[psutil.Process]]:
        """End the server; return its exit code and those of its processes that had to be killed after `timeout_s`.

        SIGTERM and not SIGINT: processes that a shell script starts in the background inherit SIGINT as ignored.
        """
        end_s = time.monotonic() + timeout_s
        others = [process for process in self.processes() if process.pid != self.pid]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.send_signal(number)
            self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(others, timeout=max(0.0, end_s - time.monotonic()))
        killed = list({*alive, *self.processes()})
        for process in killed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        code = self.process.wait()
        psutil.wait_procs(killed, timeout=timeout_s)
        return code, killed


class Server(ServerProcess):
    """A running `transom serve` on loopback."""

    def __init__(self, model: str, **settings: object) -> None:
        """Start it; `settings` are its flags by their names in Python, and True is one without a value."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = [
            text
            for name, value in settings.items()
            for text in ("--" + name.replace("_", "-"), *([] if value is True else [str(value)]))
        ]
        super().__init__([sys.executable, "-m", "transom_cluster.cli", "serve", model, "--port", str(port), *flags])

    def is_ready(self) -> bool:
        """Whether it has said that it serves."""
        return READY in self.log_text()


def start_server(model: str, **settings: object) -> Server:
    """Start a server, whose block ends it, and wait until it is ready. Raises ServerError where it does not start."""
    starts = 1
    while True:
        server = Server(model, **settings)
        try:
            server.wait_until(server.is_ready, START_TIMEOUT_S)
            return server
        except BaseException:
            server.stop()
            if starts == STARTS or RAY_WAS_LATE not in server.log_text():
                raise
        starts += 1
