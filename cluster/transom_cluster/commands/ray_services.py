"""Starts Ray on this machine with only those of its services that a server needs.

Beside its daemons (GCS, raylet) Ray starts five services, each a Python process that takes up to a second of CPU time to start,
and memory and CPU time while the server is idle. `needed_services` leaves them out of the next `ray.init`:

    service                     in a server
    autoscaler's monitor        left out: the cluster is this machine
    dashboard                   left out
    log monitor                 left out: it copies log files to the driver, which asks for none
    dashboard agent             a shell script that says that there is none, as the agent itself does without Ray's dashboard
    runtime environment agent   started `AGENT_DELAY_S` later: the actors of `transom serve` have no runtime environment, and those
                                of a later deployment wait for the agent

It changes functions of Ray that are not public, so it belongs to the exact version of Ray that Transom requires.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

AGENT_DELAY_S = 30
LOOK_S = 5  # how often a script looks whether its raylet still runs
NUM_PRESTARTED = 2  # for Serve's controller and proxy: they import Ray while the driver imports Serve

_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_NO_SERVICE = "-1"


@contextlib.contextmanager
def needed_services(*, agent_port: int) -> Iterator[None]:
    """Leave services out of a `ray.init` inside this context. `agent_port` is kept free for the runtime environment agent."""
    from ray._private import node, parameter, services

    start_process, init_parameters = services.start_ray_process, parameter.RayParams.__init__

    def start_needed(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == "raylet":
            command = raylet_command(command)
        return start_process(command, process_type, *args, **kwargs)

    def with_agent_port(self: Any, *args: Any, **kwargs: Any) -> None:
        init_parameters(self, *args, **{**kwargs, "runtime_env_agent_port": agent_port})

    def start_nothing(self: Any, **_: Any) -> None:
        pass

    changes: list[tuple[Any, str, Any]] = [
        (node.Node, "start_monitor", start_nothing),
        (node.Node, "start_api_server", start_nothing),
        (node.Node, "start_log_monitor", start_nothing),
        (services, "start_ray_process", start_needed),
        (parameter.RayParams, "__init__", with_agent_port),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, function in changes:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def raylet_command(command: list[str]) -> list[str]:
    """Return a raylet's command line with scripts in place of its agents, and with `NUM_PRESTARTED` processes to start at once."""
    flags = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
    files = [f"{flags['--session_dir']}/{name}_{flags['--node_id']}" for name in _AGENT_PORTS]
    flags["--dashboard_agent_command"] = _shell(_report_no_service(files))
    flags["--runtime_env_agent_command"] = _shell(_start_later(shlex.split(flags["--runtime_env_agent_command"])))
    flags["--num_prestart_python_workers"] = str(NUM_PRESTARTED)
    return [f"{name}={flags[name]}" if (name := part.split("=", 1)[0]) in flags else part for part in command]


def _report_no_service(files: list[str]) -> str:
    """A script that writes a port file for each service of the dashboard agent, and then runs as long as the raylet does."""
    writes = "; ".join(f"printf %s {_NO_SERVICE} > {shlex.quote(file)}" for file in files)
    return f"{writes}; while kill -0 $PPID; do sleep {LOOK_S}; done"


def _start_later(command: list[str]) -> str:
    """A script that becomes an agent after a while, if the raylet still runs."""
    return f"sleep {AGENT_DELAY_S}; kill -0 $PPID && exec {shlex.join(command)}"


def _shell(script: str) -> str:
    return subprocess.list2cmdline(["/bin/sh", "-c", script])
