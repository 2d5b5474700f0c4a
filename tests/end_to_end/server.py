"""A real server for end-to-end tests: `transom serve` on loopback, ended by its pid."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.free_ports import free_port

PATIENCE_S = 240.0
API_KEY = "sesame"
KEY = {"Authorization": f"Bearer {API_KEY}"}  # a server without keys does not look at it
# One for all, since a client takes 20 ms to make; each request has a connection of its own, and so comes to any router.
HTTP = httpx.Client(headers=KEY, timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
LOOK_S = 0.3  # a look at all processes, or at a page of metrics, takes a tenth of a second of a core
RAY_WAS_LATE = "timed out during startup"
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Server:
    """A running `transom serve`."""

    url: str
    process: subprocess.Popen[str]
    log: Path


def start_server(model: str, log: Path, *flags: str, timeout_s: float = PATIENCE_S) -> Server:
    """Start and wait until it answers; fails with the log's end when it does not.

    Ray gives its own processes 30 s to start, of which a full machine may make too little: then it is started again.
    """
    for _ in range(3):
        server = _started(model, log, flags, timeout_s)
        if server is not None:
            return server
        if RAY_WAS_LATE not in log.read_text():
            break
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def _started(model: str, log: Path, flags: Sequence[str], timeout_s: float) -> Server | None:
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "transom_cluster.cli", "serve", model, "--port", str(port), *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s and process.poll() is None:
        if "Press Ctrl-C to stop" in log.read_text():
            return server
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    stop_server(server)
    return None


def stop_server(server: Server, number: int = signal.SIGINT) -> int:
    """End it as Ctrl-C does, or with another signal; its exit code."""
    if server.process.poll() is None:
        server.process.send_signal(number)
    try:
        return server.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.process.pid, signal.SIGKILL)
        return server.process.wait()


def processes(server: Server) -> list[tuple[int, str]]:
    """Pid and arguments of every process of this server's session."""
    command = ["ps", "-ww", "-eo", "sid=,stat=,pid=,args="]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    split = [row.split(maxsplit=3) for row in rows.splitlines()]
    return [(int(row[2]), row[3]) for row in split if row[0] == str(server.process.pid) and not row[1].startswith("Z")]


def replica_pids(server: Server, kind: str) -> list[int]:
    """Processes of Ray actors whose title has `kind`: ":Worker", ":Router" or "RankActor"."""
    return [pid for pid, args in processes(server) if args.startswith("ray::") and kind in args]


def wait_for_replicas(server: Server, kind: str, count: int, *, without: int = 0) -> list[int]:
    """Wait until there are `count` processes of a kind, `without` not among them; which they are."""
    return look_until(lambda: replica_pids(server, kind), lambda pids: len(pids) == count and without not in pids)


def ray_address(server: Server) -> str:
    """Where other processes join this server's Ray."""
    found = [re.search(r"raylet/raylet .*--gcs-address=(\S+)", args) for _, args in processes(server)]
    (address,) = [match[1] for match in found if match]
    return address


def assert_ended_cleanly(server: Server, code: int) -> None:
    """Exit code 0, nothing but a word in the log, no process left."""
    lines = server.log.read_text().splitlines(keepends=True)
    # Ray's words on workers that a test has killed, and on a slow machine, at any time; they may go on over lines
    log = "".join(line for line in lines if "(raylet)" not in line and not line.startswith("\t("))
    assert code == 0, log[-4000:]
    assert log.endswith("Stopping.\n"), log[-4000:]
    assert "Traceback" not in log
    look_until(lambda: processes(server), lambda left: not left)


def look_until(look: Callable[[], Seen], is_it: Callable[[Seen], bool]) -> Seen:
    """Look again and again until what is seen is as it should be; what was seen then."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_it(seen := look()):
        assert time.monotonic() < end_s, repr(seen)[-4000:]
        time.sleep(LOOK_S)
    return seen


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of the samples of one metric on `/metrics` whose labels match; a page on which a slow worker is missing is no page."""

    def samples() -> list[Sample]:
        page = HTTP.get(f"{url}/metrics").text
        return [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def has_worker(found: list[Sample]) -> bool:
        return any(sample.name == "transom_build_info" and "worker" in sample.labels for sample in found)

    return sum(
        sample.value
        for sample in look_until(samples, has_worker)
        if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
    )
