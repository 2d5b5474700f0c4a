"""What a process of a running `transom serve` does, by name: its workers, ranks, routers, and the processes of its private Ray."""

import contextlib
import re
from pathlib import Path

import psutil

from benchmarks.server_process import ServerProcess

PROGRAMS = {"raylet": "raylet", "gcs_server": "GCS"}
# Words of a command line -> name; the first that is found counts.
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
    "text.template_renderer": "chat template",
    "transom_core.grammar.check": "grammar check",
    "/bin/sh -c printf": "stand-in for a service of Ray",
    "transom_cluster.cli": "transom serve",
}


def name_of(process: psutil.Process) -> str:
    """What the process does, in a few words. Raises psutil.Error if it has ended."""
    command = process.cmdline()
    if not command:
        return process.name()
    program = PROGRAMS.get(Path(command[0]).name)  # their arguments have the command lines of other processes in them
    return program or next((name for word, name in NAMES.items() if word in " ".join(command)), " ".join(command)[:60])


def processes_named(server: ServerProcess, *names: str) -> list[psutil.Process]:
    """The living processes of a server that have one of these names, in the order of their ids."""
    found = []
    for process in server.processes():
        with contextlib.suppress(psutil.Error):  # it has ended
            if name_of(process) in names:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def ray_address(server: ServerProcess) -> str:
    """Where other processes join a server's Ray."""
    [daemon] = processes_named(server, "raylet")
    address = re.search(r"--gcs-address=(\S+)", " ".join(daemon.cmdline()))
    assert address is not None
    return address[1]
