"""A server of one engine: it starts, gives its first answer, idles, and ends with all of its processes.

The server leads a session of its own. Its processes are all of that session and all descendants, so Ray's processes count too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time

import psutil

from peer_engines.engine import SERVED_NAME, ServerCommand

FIRST_PROMPT = list(range(1000, 1016))
POLL_S = 0.05
STOP_TIMEOUT_S = 60.0
LAST_CHARACTERS = 3000


class ServerError(RuntimeError):
    """The server ended, or gave no answer in time."""


class RunningServer:
    """One server on a free port of loopback."""

    def __init__(self, name: str, command: ServerCommand, port: int) -> None:
        self.name, self.port = name, port
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, `stop` closes it
        self._begin_s = time.perf_counter()
        self._process = subprocess.Popen(
            list(command.command),
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def first_answer(self, timeout_s: float) -> float:
        """Ask until one token comes back; return the seconds since the server's start. Raises ServerError."""
        while time.perf_counter() - self._begin_s < timeout_s:
            if self._process.poll() is not None:
                raise ServerError(f"{self.name}: the server ended with code {self._process.returncode}: {self._tail()}")
            if self._answers():
                return time.perf_counter() - self._begin_s
            time.sleep(POLL_S)
        raise ServerError(f"{self.name}: no answer in {timeout_s:.0f} s: {self._tail()}")

    def idle_share(self, settle_s: float, duration_s: float) -> float:
        """Processor seconds per second of all the server's processes while nothing is asked: 1 is one core."""
        time.sleep(settle_s)
        before, begin_s = self._cpu_seconds(), time.perf_counter()
        time.sleep(duration_s)
        after, spent_s = self._cpu_seconds(), time.perf_counter() - begin_s
        return sum(seconds - before.get(process, 0.0) for process, seconds in after.items()) / spent_s

    def memory_bytes(self) -> int:
        """Proportional memory of all the server's processes: a page that several share counts once."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the server as Ctrl-C does, and kill those of its processes that have not ended after `timeout_s`."""
        left = self._processes()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(left, timeout=timeout_s)
        killed = {*alive, *self._processes()}
        for process in killed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(killed, timeout=timeout_s)
        self._process.wait()
        self._log.close()

    def _answers(self) -> bool:
        body = {"model": SERVED_NAME, "prompt": FIRST_PROMPT, "max_tokens": 1, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return response.status == 200

    def _processes(self) -> list[psutil.Process]:
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(self._process.pid).children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self._process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process)
        return list(found)

    def _cpu_seconds(self) -> dict[psutil.Process, float]:
        found = {}
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process] = times.user + times.system
        return found

    def _tail(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-LAST_CHARACTERS:]


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
