"""Starts a private Ray cluster on this machine, runs the Serve app in it, watches it, and ends all of its processes.

Daemon: a process of Ray that this process has started (GCS, raylet). All other processes of Ray are descendants of the daemons.

    cluster.start(given, progress)   Ray, Serve and the app run
    cluster.wait()                   returns if a daemon dies; a signal interrupts it
    cluster.drain()                  after SIGTERM only: running requests end
    cluster.write_caches()           workers write the disk tier
    cluster.stop()                   always
"""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transom_cluster.commands.log_follower import LogFollower
from transom_cluster.commands.process_tree import children_of, descendants_of, end_processes, is_running, kill_processes
from transom_cluster.commands.startup_progress import StartupProgress
from transom_cluster.serve.worker_resources import ClusterResources, worker_resources
from transom_core.settings.settings import Settings

logger = logging.getLogger("transom.cli")

APP_NAME = "transom"
OBJECT_STORE_BYTES = 100 * 2**20  # no large object passes through it
POLL_S = 0.25  # each poll takes milliseconds of CPU, which the start itself needs
WATCH_S = 1.0  # how often `wait` looks whether the daemons run
DRAIN_S = 35.0  # a little more than `Router.stop` waits
STOP_WORKERS_S = 15.0  # an engine writes its cache for up to 5 s, and its ranks write what is queued for another 5 s
SETTLE_S = 0.1  # the proxy needs this time to send the last bytes that routers wrote

# A thread gives freed memory back to the kernel after 5 s. Few arenas, since what is freed in one serves only its threads.
JEMALLOC_SETTINGS = "background_thread:true,dirty_decay_ms:5000,muzzy_decay_ms:0,narenas:2"

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without GPUs keep CUDA_VISIBLE_DEVICES as it is
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_enable_metrics_collection": "0",  # Ray's own metrics are on a port that is open to all; Transom's are at /metrics
    # Without these reports, which nothing reads here, an idle server seldom wakes up.
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "60000",
    # Routers and workers run on Serve's event loop, so that no message changes threads: a tenth more tokens/s on two cores.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_worker_niceness": "0",  # of Serve's processes; Ray's 15 gives any other program most of a core
    # glibc has up to 8 arenas for each core, one for each thread, and what is freed in an arena serves only its threads.
    "MALLOC_ARENA_MAX": "2",
    # Python's own allocator gives memory back in MiB that are wholly free, so processes grow for hours; malloc gives back pages.
    "PYTHONMALLOC": "malloc",
    # Serve replaces a proxy that is not ready after three times this period; this process would then wait for the old one.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}


def _allocator() -> dict[str, str]:
    """Return the variables with which Ray's processes allocate by jemalloc, which is in Ray's wheels for Linux; none if it is not
    there, or if other libraries are preloaded.

    glibc's malloc fragments, so that routers and workers grow for hours, and jemalloc is faster (docs/reliability.md).
    """
    package = find_spec("ray")  # without importing it: Ray reads its variables then
    library = None if package is None or package.origin is None else Path(package.origin).parent / "core/libjemalloc.so"
    if library is None or not library.is_file() or "LD_PRELOAD" in os.environ:
        return {}
    if {" ", ":"} & set(str(library)):  # they separate libraries
        return {}
    return {"LD_PRELOAD": str(library), "MALLOC_CONF": JEMALLOC_SETTINGS}


class StartFailed(Exception):
    """The server could not be started. The message is for the user."""


class LocalRay:
    """Owns the private Ray of one `transom serve`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._port = settings.port  # 0: `start` chooses a free port
        self._folder: str | None = None
        self._follower: LogFollower | None = None
        # Bound until Ray has ended: HAProxy listens on these ports later, and Ray takes many free ports while it starts.
        self._reserved_ports: dict[str, socket.socket] = {}

    @property
    def local_url(self) -> str:
        """Return the server's URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def start(self, given: dict[str, Any], progress: StartupProgress) -> None:
        """Start Ray, Serve and the app, and wait until both deployments run.

        Raises:
            StartFailed: Ray, Serve or the app could not be started; the message has the reason.
        """
        progress.stage("starting Ray")
        self._port = self._port or _free_port(self._settings.host)
        # Every process of Ray inherits these variables. A runtime environment would set them, too, but Ray starts processes for it.
        machine = ClusterResources.of_this_machine()
        resources = worker_resources(self._settings, machine)
        haproxy = self._haproxy_environment() if self._settings.haproxy else {}
        for name, value in (_ENVIRONMENT | _allocator() | haproxy | resources.environment).items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_MODE" not in os.environ:
            # Ray's own ports listen on every interface. They accept only the token of this run, which is not in any file.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        with _as_start_failure("Ray"), keep_signal_handlers():
            self._start_ray(machine)
        if self._settings.log_format == "json" and self._folder is not None:
            self._follower = LogFollower(Path(self._folder, "session_latest", "logs"))
        progress.stage("starting Serve")
        with _as_start_failure("Serve"):
            self._start_serve(given)
        progress.stage("loading the model and warming up")
        self._wait_for_app()

    def wait(self) -> None:
        """Return when a daemon of Ray has ended unexpectedly."""
        daemons = children_of(os.getpid())
        while all(map(is_running, daemons)):
            time.sleep(WATCH_S)

    def drain(self) -> None:
        """Refuse new requests, and return when the running ones have ended or after `DRAIN_S`."""
        try:
            asyncio.run(_drain_routers())
        except Exception as error:  # a dead router has no requests to wait for
            logger.warning("The server could not wait for running requests: %r", error)
        time.sleep(SETTLE_S)

    def write_caches(self) -> None:
        """Let the workers end and write their caches to the disk tier. Does nothing if there is no disk tier."""
        if self._settings.disk_cache is None:
            return
        try:
            asyncio.run(_stop_workers(self._settings))
        except Exception as error:  # the cache is lost, and nothing else
            logger.warning("What is cached could not be written to --disk-cache: %r", error)

    def stop(self) -> None:
        """End every process that this object started, within seconds. Idempotent."""
        started = descendants_of(os.getpid())
        if self._folder is not None:
            import ray

            logging.disable(logging.CRITICAL)  # Ray would log errors about the processes that are killed here
            daemons = children_of(os.getpid())
            with _discard_stderr():  # Ray's native threads log such errors, too
                # Kill the daemons' descendants first: `ray.shutdown` would wait long for busy processes.
                kill_processes(process for process in started if process not in daemons)
                ray.shutdown()
                end_processes(started)
            if self._follower is not None:
                self._follower.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for reserved in self._reserved_ports.values():
            reserved.close()

    def _start_ray(self, machine: ClusterResources) -> None:
        import ray

        self._folder = tempfile.mkdtemp(prefix="transom-")
        ray.init(
            address="local",
            num_cpus=int(machine.node_cpus[0]),
            num_gpus=machine.num_gpus,  # Ray itself would count "-1", and each name of a GPU that is named twice
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=self._folder,
        )

    def _haproxy_environment(self) -> dict[str, str]:
        """Choose free ports for HAProxy's own pages, since a second server on this machine could not use the default ones."""
        ports = {}
        for name in ("STATS", "METRICS"):
            reserved = self._reserved_ports[name] = _reserve_port()
            ports[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(reserved.getsockname()[1])
        return {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            # HAProxy closes a connection whose client has sent nothing of a begun request, or read nothing, for this time. The time
            # in which a worker sends nothing does not count.
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
            **ports,
        }

    def _start_serve(self, given: dict[str, Any]) -> None:
        from ray import serve

        from transom_cluster.app import SERVE_PROXY_SETTINGS, build_local_app

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            http_options={"host": self._settings.host, "port": self._port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        target = serve.RunTarget(
            target=build_local_app({name: value for name, value in given.items() if name not in SERVE_PROXY_SETTINGS}),
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
                raise StartFailed(failure_reason([app.message, *(d.message for d in app.deployments.values())]))
            time.sleep(POLL_S)


async def _drain_routers() -> None:
    from ray import serve

    handle = serve.get_app_handle(APP_NAME)  # with Serve's throughput settings handles work on an event loop only
    await handle.broadcast("drain").results_async(timeout_s=DRAIN_S)


async def _stop_workers(settings: Settings) -> None:
    from ray import serve

    from transom_cluster.app import worker_names

    handles = [serve.get_deployment_handle(name, APP_NAME) for name in worker_names(settings)]
    stops = [handle.broadcast("stop").results_async(timeout_s=STOP_WORKERS_S) for handle in handles]
    await asyncio.gather(*stops)


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after Ray's start: Ray installs a SIGTERM handler that raises SystemExit in Python, and a native
    one that dumps a stack.

    SIGHUP is blocked while Ray starts, and Ray's processes inherit that: when a terminal closes, all processes of its group get
    SIGHUP, and only this process may decide how the server ends.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discard standard error output, including that of native code."""
    kept, null_device = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null_device)


@contextlib.contextmanager
def _as_start_failure(what: str) -> Iterator[None]:
    """Turn an error of Ray into `StartFailed` with one line of its message: HAProxy's alert, else the first one. The rest may be a
    whole log file.
    """
    try:
        yield
    except Exception as error:
        logger.debug("%s did not start.", what, exc_info=error)
        reason = getattr(error, "cause", None) or error  # the text of an error in a Ray task begins with the task
        lines = str(reason).strip().splitlines() or [type(reason).__name__]
        line = next((one for one in lines if one.startswith("[ALERT]")), lines[0])
        raise StartFailed(f"{what} could not be started: {line}") from error


def _reserve_port() -> socket.socket:
    """Bind a socket to a free port of every interface, so that no process that asks for any free port gets it.

    The socket does not listen and has SO_REUSEADDR, so that a server, which asks for this very port with SO_REUSEADDR, gets it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("0.0.0.0", 0))
    return reserved


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def failure_reason(messages: list[str]) -> str:
    """Return the message of Transom's own error in Serve's tracebacks, or the tracebacks' last lines if there is none."""
    text = "\n".join(messages)
    ours = re.findall(r"^\s*transom_core\.errors\.\w+: (.+)$", text, flags=re.MULTILINE)
    if ours:
        return str(ours[-1])
    lines = [line for line in text.splitlines() if line.strip()]
    return "The app could not be started:\n" + "\n".join(lines[-15:])
