"""A private Ray on this machine with the Serve app in it: started, watched and ended with everything that belongs to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transom_cluster.commands.log_follower import LogFollower
from transom_cluster.commands.process_tree import (
    children_of,
    descendants_of,
    end_processes,
    is_running,
    kill_processes,
)
from transom_cluster.commands.startup_progress import StartupProgress
from transom_cluster.serve.worker_resources import check_gpus
from transom_worker.settings import Settings

logger = logging.getLogger("transom.cli")

APP_NAME = "transom"
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large goes through it
POLL_S = 0.25  # each look costs Serve's controller and us some milliseconds, which the start itself needs
WATCH_S = 1.0
DRAIN_S = 35.0  # a little more than routers give themselves
SETTLE_S = 0.1  # what routers wrote last passes through the proxy

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_enable_metrics_collection": "0",  # Ray's own, on a port that everybody reaches; ours are at /metrics
}


class StartFailed(Exception):
    """The server did not come up; the message is for the user."""


class LocalRay:
    """Owns the private Ray of one `transom serve`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._port = settings.port  # 0: chosen at the start
        self._folder: str | None = None
        self._follower: LogFollower | None = None
        self._held: dict[str, socket.socket] = {}  # until HAProxy has ended: Ray takes many ports while it starts

    @property
    def local_url(self) -> str:
        """Where this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def start(self, given: dict[str, Any], progress: StartupProgress) -> None:
        """Start Ray, Serve and the app, and wait until both deployments run.

        Raises:
            StartFailed: the app could not be deployed; with the reason.
        """
        progress.stage("starting Ray")
        self._port = self._port or _free_port(self._settings.host)
        for name, value in (_ENVIRONMENT | (self._haproxy_environment() if self._settings.haproxy else {})).items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_MODE" not in os.environ:
            # Ray's own ports listen on every interface. A token of this run's keeps others out, and leaves no file behind.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        with _as_start_failure("Ray"), _keeping_signal_handlers():
            self._start_ray()
        if self._settings.log_format == "json" and self._folder is not None:
            self._follower = LogFollower(Path(self._folder, "session_latest", "logs"))
        self._check_gpus()
        progress.stage("starting Serve")
        with _as_start_failure("Serve"):
            self._start_serve(given)
        progress.stage("loading the model and warming up")
        self._wait_for_app()

    def wait(self) -> None:
        """Return when a process of Ray has ended by itself, which it should not."""
        daemons = children_of(os.getpid())
        while all(map(is_running, daemons)):
            time.sleep(WATCH_S)

    def drain(self) -> None:
        """Refuse new requests and return when running answers have ended, or after `DRAIN_S`."""
        try:
            asyncio.run(_drain_routers())
        except Exception as error:  # a router that is gone has nothing to finish
            logger.warning("Running answers could not be waited for: %r", error)
        time.sleep(SETTLE_S)

    def stop(self) -> None:
        """End every process that was started here; takes seconds at most. Idempotent."""
        started = descendants_of(os.getpid())
        if self._folder is not None:
            import ray

            logging.disable(logging.CRITICAL)  # what ends on purpose need not complain
            daemons = children_of(os.getpid())
            with _silent_stderr():  # nor need Ray's threads below Python, which find its processes gone
                kill_processes(process for process in started if process not in daemons)  # Ray waits long for busy ones
                ray.shutdown()
                end_processes(started)
            if self._follower is not None:
                self._follower.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for held in self._held.values():
            held.close()

    def _start_ray(self) -> None:
        import ray

        self._folder = tempfile.mkdtemp(prefix="transom-")
        ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=self._folder,
            _system_config={"prestart_worker_first_driver": False},
        )

    def _haproxy_environment(self) -> dict[str, str]:
        """HAProxy's own pages get free ports, since a second server on this machine could not start with the usual ones."""
        self._held = {name: _held_port() for name in ("STATS", "METRICS")}
        ports = {f"RAY_SERVE_HAPROXY_{name}_PORT": str(held.getsockname()[1]) for name, held in self._held.items()}
        return {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", **ports}

    def _check_gpus(self) -> None:
        """Ray may find fewer than the device files promised; a worker that asks for what is not there would wait for ever."""
        import ray

        if problem := check_gpus(self._settings, int(ray.cluster_resources().get("GPU", 0))):
            raise StartFailed(problem)

    def _start_serve(self, given: dict[str, Any]) -> None:
        from ray import serve

        from transom_cluster.app import SERVE_PROXY_SETTINGS, build_app

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self._settings.host, "port": self._port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        target = serve.RunTarget(
            target=build_app({name: value for name, value in given.items() if name not in SERVE_PROXY_SETTINGS}),
            name=APP_NAME,
            route_prefix="/",
            logging_config={"log_level": "INFO", "enable_access_log": False},
        )
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _wait_for_app(self) -> None:
        from ray import serve

        while True:
            app = serve.status().applications.get(APP_NAME)
            state = "" if app is None else app.status.value
            if state == "RUNNING":
                return
            if app is not None and state in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartFailed(_reason([app.message, *(d.message for d in app.deployments.values())]))
            time.sleep(POLL_S)


async def _drain_routers() -> None:
    from ray import serve

    handle = serve.get_app_handle(APP_NAME)  # with Serve's throughput settings handles work on an event loop only
    await handle.broadcast("drain").results_async(timeout_s=DRAIN_S)


@contextlib.contextmanager
def _keeping_signal_handlers() -> Iterator[None]:
    """Ray's start takes SIGTERM: in Python it raises SystemExit, and below Python it dumps a stack. Undo both."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """What is written to the standard error output meanwhile, by Python or below it, goes nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def _as_start_failure(what: str) -> Iterator[None]:
    """Ray's errors carry whole log files; people need their first line."""
    try:
        yield
    except Exception as error:
        logger.debug("%s did not start.", what, exc_info=error)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StartFailed(f"{what} could not be started: {lines[0]}") from error


def _held_port() -> socket.socket:
    """A socket on a free port of every interface, which HAProxy may take over and nobody else who takes any port.

    It does not listen, and lets others have the address who ask as servers do (SO_REUSEADDR).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    return held


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _reason(messages: list[str]) -> str:
    """Our own error out of Serve's tracebacks, or their end."""
    text = "\n".join(messages)
    ours = re.findall(r"^\s*transom_worker\.errors\.\w+: (.+)$", text, flags=re.MULTILINE)
    if ours:
        return str(ours[-1])
    lines = [line for line in text.splitlines() if line.strip()]
    return "The app could not be started:\n" + "\n".join(lines[-15:])
