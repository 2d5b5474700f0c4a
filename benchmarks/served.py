"""A server for benchmarks: `transom serve` in a process of its own, and the processes of its private Ray, by name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

READY = "Press Ctrl-C to stop"
PATIENCE_S = 400.0
LOOK_S = 0.02
PROGRAMS = {"raylet": "raylet", "gcs_server": "GCS"}
# Words of a command line that tell a process of Ray by its name; the first that is found counts.
NAMES = {
    "ServeReplica:transom:Worker": "worker",
    "ServeReplica:transom:Router": "router",
    "ProxyActor": "Serve's proxy",
    "ServeController": "Serve's controller",
    "RankActor": "rank",
    "RuntimeEnvAgent": "runtime environment agent",
    "runtime_env/agent": "runtime environment agent",
    "DashboardAgent": "dashboard agent",
    "dashboard/agent.py": "dashboard agent",
    "dashboard/dashboard.py": "dashboard",
    "log_monitor": "log monitor",
    "monitor.py": "autoscaler's monitor",
    "default_worker.py": "Ray worker that starts",
    "ray::IDLE": "idle Ray worker",
    "haproxy": "HAProxy",
    "text.template_process": "chat template",
    "/bin/sh -c printf": "stand-in for a service of Ray",
    "transom_cluster.cli": "transom serve",
}


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs, and the time when its command was started (`time.perf_counter`)."""

    url: str
    process: psutil.Popen
    begin_s: float
    log: Path

    def processes(self) -> list[psutil.Process]:
        """The server's process, and all processes below it."""
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]


@contextlib.contextmanager
def serving(model: str, flags: Sequence[str] = (), *, environment: Mapping[str, str] = os.environ) -> Iterator[Served]:
    """Start `transom serve` on a free port of loopback, and end it afterwards. The server may not be ready yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "transom_cluster.cli", "serve", model, "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as out:
            begin_s = time.perf_counter()
            process = psutil.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=dict(environment)
            )
        try:
            yield Served(f"http://127.0.0.1:{port}", process, begin_s, log)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself, which the caller has seen or will see
                process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def wait_until_ready(server: Served) -> None:
    """Return when the server has printed that it serves. Raises RuntimeError with its log if it ends before that."""
    end_s = time.monotonic() + PATIENCE_S
    while READY not in server.log.read_text():
        if server.process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"The server did not start:\n{server.log.read_text()[-4000:]}")
        time.sleep(LOOK_S)


def name_of(process: psutil.Process) -> str:
    """What a process of the server does, in a few words."""
    command = process.cmdline()
    if not command:
        return process.name()
    program = PROGRAMS.get(Path(command[0]).name)  # their arguments have the command lines of other processes in them
    return program or next((name for word, name in NAMES.items() if word in " ".join(command)), " ".join(command)[:60])
