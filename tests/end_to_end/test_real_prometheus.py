"""Every panel's and every alert's query on a real Prometheus, which scrapes a real server under traffic.

Two workers, two routers, windows over full layers, pools so small that requests are preempted and windows are given up.
"""

import asyncio
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.monitor import prometheus_command, wait_for
from scripts.monitor_settings import MONITORING, prometheus_configuration

from benchmarks.server_process import Server, ServerProcess, start_server
from tests.dashboards.dashboard_files import all_queries, dashboards, variables
from tests.end_to_end.server import HTTP, assert_ended_cleanly, look_until
from tests.end_to_end.streams import ask_until
from tests.free_ports import free_port
from tests.prometheus_programs import prometheus_program

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve, pytest.mark.timeout(900)]

ALERTS = MONITORING / "alerts.yml"
SETTINGS: dict[str, Any] = {
    **{"replicas": 2, "max_replicas": 2, "min_replicas": 2, "router_replicas": 2},
    **{"window": 24, "window_pattern": "SF", "block_size": 8, "max_model_len": 256},
    **{"max_num_seqs": 8, "kv_cache_memory_bytes": "190KiB"},
}
# Of anything but a selector, `timestamp` is the query's time.
SCRAPED_S = 'timestamp(up{job="transom"}) and up{job="transom"} == 1'
# What the traffic does, as queries that find something above 0.
SHOWN = (
    'transom_prefix_tokens_total{outcome="hit"}',
    'transom_prefix_tokens_total{outcome="repaired"}',
    'transom_prefix_tokens_total{outcome="missed",reason="never_seen"}',
    "transom_preemptions_total",
    "transom_kv_evicted_blocks_total",
    'transom_requests_total{finish_reason="length"}',
)
# Panels that may be empty, each with its reason.
MAY_BE_EMPTY = {
    ("transom-overview", "Broken answers"): "none breaks off",
    ("transom-router", "Degraded answers by parser"): "no answer has markup",
    ("transom-router", "Tool calls by outcome"): "nor tools",
    ("transom-kv-cache", "Wait for a prefix p95"): "workers do not fetch from each other",
    **{
        ("transom-kv-cache", title): "layers with windows have no KV policies"
        for title in ("Kept tokens by policy", "Blocks dropped and windows", "Quality by policy")
    },
    **{
        ("transom-workers", title): "Ray's agents are another job"
        for title in ("CPU of hosts", "Memory of hosts", "Busy GPUs", "Memory of GPUs")
    },
}
NUM_CLIENTS = 20
NUM_CONVERSATIONS = 12
NUM_TURNS = 120  # after which all conversations are new
PAUSE_S = 0.2  # of a client after each answer: there is pressure enough, and others need the cores as well


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one."""

    url: str

    def get(self, path: str, **params: str | float) -> Any:
        """The data of a part of its API."""
        answer = HTTP.get(f"{self.url}/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", (path, params, answer)
        return answer["data"]

    def query(self, expression: str, **at: float) -> list[dict[str, Any]]:
        """The series of an instant query, now or as they were at `time`."""
        result: list[dict[str, Any]] = self.get("query", query=expression, **at)["result"]
        return result


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    prometheus_program("prometheus")  # without it, the test is skipped
    with start_server(str(tiny_model), **SETTINGS) as server:
        yield server
        assert_ended_cleanly(server)


@pytest.fixture
def pages(server: Server, tmp_path: Path) -> Iterator[Prometheus]:
    """`make monitor`'s Prometheus over the server."""
    port = free_port()
    found = Prometheus(f"http://127.0.0.1:{port}")
    command = prometheus_command(tmp_path, prometheus_configuration(server.url, ""), port)
    with ServerProcess(command) as process:
        wait_for(process, f"{found.url}/-/ready")
        yield found


def test_every_panel_shows_something_and_every_alert_is_looked_at(server: Server, pages: Prometheus) -> None:
    """Each query at the time of one of the pages, that is: traffic goes on until all have shown something."""
    asyncio.run(press(server.url, Missing(pages)))
    check_alerts(pages)


class Missing:
    """What no page has shown so far: titles of panels and names of series, with their queries."""

    def __init__(self, pages: Prometheus) -> None:
        self._pages = pages
        self._scraped_s = 0.0
        self.queries = {(one, f"sum(rate({one}[1m])) > 0") for one in SHOWN}
        for board in dashboards():
            for title, expression, _ in all_queries(board):
                if (board["uid"], title) not in MAY_BE_EMPTY:
                    self.queries.add((f"{board['uid']}: {title}", substituted(expression, board)))

    def look(self) -> list[str]:
        """Look at what is missing once for each page, at the time of its scrape; the titles of what still is."""
        at_s = sum(float(series["value"][1]) for series in self._pages.query(SCRAPED_S))
        if at_s != self._scraped_s:
            self._scraped_s = at_s
            self.queries -= {one for one in self.queries if shows_something(self._pages.query(one[1], time=at_s))}
        return sorted(title for title, _ in self.queries)


def shows_something(series: list[dict[str, Any]]) -> bool:
    """Whether there is a number among what a query found."""
    return any(math.isfinite(float(one["value"][1])) for one in series)


def substituted(expression: str, board: dict[str, Any]) -> str:
    """As Grafana sends it, with all of every variable chosen."""
    expression = expression.replace("$__rate_interval", "1m").replace("$__range", "1m").replace("$__interval", "5s")
    for name in variables(board):
        expression = re.sub(rf"\$\{{?{name}(:\w+)?\}}?(?!\w)", ".+", expression)
    assert "$" not in expression, expression
    return expression


def body(conversation: int, turn: int) -> dict[str, Any]:
    """A conversation's prompt grows from turn to turn, until a new one takes its place; every third request streams, every
    fourth draws lots, and every fifth has a grammar."""
    lengths = 20 + turn // 50 % 20  # a new one now and then, which must be compiled
    grammar: dict[str, Any] = {"structured_outputs": {"regex": f"[a-z ]{{{lengths}}}"}, "ignore_eos": False}
    name = f"{conversation} of round {turn // NUM_TURNS}"
    told = " ".join(f"Turn {i} of conversation {name} says so." for i in range(turn % 4 + 1))
    return {
        "prompt": f"All of them begin alike. {told}",
        "max_tokens": 24 + 8 * (turn % 3),
        "ignore_eos": True,
        "temperature": float(turn % 4 == 3),
        "seed": turn,
        "stream": turn % 3 == 0,
        **(grammar if turn % 5 == 0 else {}),
    }


async def press(url: str, missing: Missing) -> None:
    """Clients that ask again and again until nothing is missing; all answers come."""
    is_over = False
    requests = (body(turn * 7 % NUM_CONVERSATIONS, turn) for turn in itertools.count())
    asking = asyncio.create_task(ask_until(url, [requests] * NUM_CLIENTS, lambda: is_over, pause_s=PAUSE_S))
    try:
        await asyncio.to_thread(look_until, missing.look, lambda titles: not titles)
    finally:
        is_over = True
        await asking


def check_alerts(pages: Prometheus) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        pages.query(rule["expr"])  # valid

    def health() -> list[tuple[str, str]]:
        groups = pages.get("rules")["groups"]
        return [(rule["name"], rule["health"]) for group in groups for rule in group["rules"]]

    looked_at = look_until(health, lambda found: all(state != "unknown" for _, state in found))
    assert sorted(looked_at) == sorted((rule.get("alert") or rule["record"], "ok") for rule in rules)
