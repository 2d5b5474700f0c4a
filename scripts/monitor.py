"""`make monitor`: Prometheus, and Grafana where it is installed, over a running `make serve`, until Ctrl-C.

Both listen on loopback, with the alert rules of `deploy/monitoring/` and the dashboards of `dashboards/json/` in place.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from scripts.monitor_settings import (
    DASHBOARDS,
    HOST,
    ROOT,
    CannotStart,
    first_key,
    grafana_command,
    grafana_environment,
    prometheus_configuration,
)

from benchmarks.server_process import ServerError, ServerProcess

READY_TIMEOUT_S = 60.0
POLL_S = 0.1
LOOK_TIMEOUT = httpx.Timeout(30.0, connect=5.0)  # a server whose machine is full has accepted long before it answers
KEY_HINTS: dict[int, str] = {
    httpx.codes.UNAUTHORIZED: " Give the server's keys with --api-key-file.",
    httpx.codes.FORBIDDEN: " It wants an admin's key: give --api-key-file the file of --admin-api-key-file.",
}


def main() -> int:
    """Start everything, say where it is, wait, and end everything; the exit code."""
    given = arguments(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="transom-monitor-") as temporary, contextlib.ExitStack() as stack:
        try:
            servers = start(given, given.data.resolve() if given.data else Path(temporary), stack)
            while True:
                for server in servers:
                    server.check()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("\nStopping.", flush=True)
            return 0
        except (CannotStart, ServerError) as problem:
            print(f"transom: {problem}", file=sys.stderr)
            return 1


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make monitor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=f"http://{HOST}:8000", help="where the server is (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, help="the server's, if it has one; its first key is used")
    parser.add_argument("--port", type=int, default=9090, help="Prometheus' port (default: %(default)s)")
    parser.add_argument("--grafana-port", type=int, default=3000, help="Grafana's port (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, help="where the series stay (default: a folder that is removed at the end)"
    )
    return parser.parse_args(words)


def start(given: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> list[ServerProcess]:
    """Start Prometheus, then Grafana, until the stack is left; their addresses are printed once they answer.

    Raises:
        CannotStart: a program is missing.
        ServerError: one does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = first_key(given.api_key_file)
    warn_without_answer(given.url, key)
    prometheus_url = f"http://{HOST}:{given.port}"
    command = prometheus_command(folder, prometheus_configuration(given.url, key), given.port)
    servers = [stack.enter_context(ServerProcess(command))]
    wait_for(servers[-1], f"{prometheus_url}/-/ready")
    print(f"Prometheus  {prometheus_url}   (alerts: {prometheus_url}/alerts)", flush=True)
    grafana = grafana_command()
    if grafana is None:
        print(
            f"Grafana     is not installed here. In any Grafana from 10 on, add {prometheus_url} as a Prometheus data"
        )
        print(f"            source, then Dashboards, New, Import: each file of {DASHBOARDS}", flush=True)
    else:
        url = f"http://{HOST}:{given.grafana_port}"
        settings = grafana_environment(folder, port=given.grafana_port, prometheus_url=prometheus_url, url=given.url)
        servers.append(stack.enter_context(ServerProcess(grafana, settings)))
        wait_for(servers[-1], f"{url}/api/health")
        print(f"Grafana     {url}/d/transom-overview", flush=True)
    print("\nPress Ctrl-C to stop.", flush=True)
    return servers


def prometheus_command(folder: Path, configuration: str, port: int) -> list[str]:
    """Prometheus with its configuration written, which has the API key in it.

    Raises:
        CannotStart: there is none, and none could be had.
    """
    found = subprocess.run([ROOT / "scripts/prometheus", "prometheus"], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        raise CannotStart("Without Prometheus there is nothing to start.")
    file = folder / "prometheus.yml"
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(configuration)
    return [
        found.stdout.strip(),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'series'}",
        f"--web.listen-address={HOST}:{port}",
        "--enable-feature=exemplar-storage",
    ]


def wait_for(server: ServerProcess, url: str) -> None:
    """Wait until a server answers at this address. Raises ServerError if it ends, or does not answer in time."""

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, trust_env=False, timeout=5).status_code == httpx.codes.OK
        return False

    server.wait_until(is_ready, READY_TIMEOUT_S)


def warn_without_answer(url: str, key: str) -> None:
    """Say at once what people would find later on Prometheus' page of targets."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        status = httpx.get(
            f"{url.rstrip('/')}/metrics", headers=headers, trust_env=False, timeout=LOOK_TIMEOUT
        ).status_code
    except httpx.HTTPError:
        print(f"transom: nothing answers at {url} yet; `make serve` starts it, --url names another.", file=sys.stderr)
        return
    if status != httpx.codes.OK:
        hint = KEY_HINTS.get(status, "")
        print(f"transom: {url}/metrics answers {status}.{hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
