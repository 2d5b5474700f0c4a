"""Looks at a real server of an end-to-end test: its processes, its pages of metrics, and how it ends."""

import signal
import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from benchmarks.server_process import Server
from benchmarks.serving.process_names import processes_named
from benchmarks.serving.soak.cluster import Page

PATIENCE_S = 240.0
API_KEY = "sesame"
KEY = {"Authorization": f"Bearer {API_KEY}"}  # a server without keys does not look at it
# One for all, since a client takes 20 ms to make; each request has a connection of its own, and so comes to any router.
HTTP = httpx.Client(headers=KEY, timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
LOOK_S = 0.3  # a look at all processes, or at a page of metrics, takes a tenth of a second of a core
Seen = TypeVar("Seen")


def replica_pids(server: Server, kind: str) -> list[int]:
    """Processes of Ray actors of a kind: "worker", "router" or "rank"."""
    return [process.pid for process in processes_named(server, kind)]


def wait_for_replicas(server: Server, kind: str, count: int, *, without: int = 0) -> list[int]:
    """Wait until there are `count` processes of a kind, `without` not among them; which they are."""
    return look_until(lambda: replica_pids(server, kind), lambda pids: len(pids) == count and without not in pids)


def assert_ended_cleanly(server: Server, number: signal.Signals = signal.SIGINT) -> None:
    """As at Ctrl-C, or at another signal: exit code 0, nothing but a word in the log, no process left."""
    code, killed = server.stop(PATIENCE_S, number)
    lines = server.log_text().splitlines(keepends=True)
    # Ray's words on workers that a test has killed, and on a slow machine, at any time; they may go on over lines
    log = "".join(line for line in lines if "(raylet)" not in line and not line.startswith("\t("))
    assert code == 0, log[-4000:]
    assert log.endswith("Stopping.\n"), log[-4000:]
    assert "Traceback" not in log
    assert not killed


def look_until(look: Callable[[], Seen], is_it: Callable[[Seen], bool]) -> Seen:
    """Look again and again until what is seen is as it should be; what was seen then."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_it(seen := look()):
        assert time.monotonic() < end_s, repr(seen)[-4000:]
        time.sleep(LOOK_S)
    return seen


def page_of(server: Server, path: str = "/metrics") -> Page:
    """A page of metrics; the usual one has all routers', workers' and ranks'."""
    return Page.read(HTTP.get(f"{server.url}{path}").text)


def metric(server: Server, name: str, **labels: str) -> float:
    """Sum of the samples of one metric on `/metrics` whose labels match; a page on which a slow worker is missing is no page."""
    page = look_until(lambda: page_of(server), lambda page: bool(page.labels("transom_build_info", "worker")))
    return page.sum(name, **labels)
