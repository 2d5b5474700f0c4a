"""Every panel's and every alert's query on a real Prometheus, which scrapes a real server under traffic that does everything.

Two workers, two routers, windows over full layers, pools so small that requests are preempted and windows are given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.dashboards.dashboard_files import all_queries
from tests.end_to_end.prometheus_server import Prometheus, prometheus
from tests.end_to_end.server import (
    HTTP,
    Server,
    assert_ended_cleanly,
    look_until,
    start_server,
    stop_server,
)
from tests.prometheus_programs import prometheus_program

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve, pytest.mark.timeout(900)]  # the first waits for all traffic

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "dashboards" / "json").glob("*.json"))
ALERTS = ROOT / "deploy" / "monitoring" / "alerts.yml"
FLAGS = (
    *("--replicas", "2", "--max-replicas", "2", "--min-replicas", "2", "--router-replicas", "2"),
    *("--window", "24", "--window-pattern", "SF", "--block-size", "8", "--max-model-len", "256"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", "190KiB"),
)
# Of anything but a selector, `timestamp` is the query's time.
SCRAPED_S = 'timestamp(up{job="transom"}) and up{job="transom"} == 1'
# What that traffic must have shown before the queries run.
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
    **{
        ("transom-workers", title): "Ray's agents are another job"
        for title in ("CPU of hosts", "Memory of hosts", "Busy GPUs", "Memory of GPUs")
    },
}
NUM_CLIENTS = 20
NUM_CONVERSATIONS = 12
NUM_TURNS = 120  # after which all conversations are new
PAUSE_S = 0.2  # of a client after each answer: there is pressure enough, and others need the cores as well
PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Monitored:
    """A server and who scrapes it."""

    server: Server
    pages: Prometheus  # by one router's page
    processes: Prometheus  # process by process, as the router lists them
    traffic: Traffic


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Monitored]:
    program = prometheus_program("prometheus")
    folder = tmp_path_factory.mktemp("monitored")
    server = start_server(str(tiny_model), folder / "log", *FLAGS)
    try:
        by_page = [job(static_configs=[{"targets": [server.url.removeprefix("http://")]}])]
        by_process = [job(http_sd_configs=[{"url": f"{server.url}/metrics/sd", "refresh_interval": "1s"}])]
        with (
            prometheus(program, folder / "pages", by_page, rules=ALERTS) as pages,
            prometheus(program, folder / "processes", by_process) as processes,
        ):
            traffic = Traffic(pages)
            asyncio.run(press(server.url, traffic.has_shown_everything))
            yield Monitored(server, pages, processes, traffic)
    finally:
        code = stop_server(server)
    assert_ended_cleanly(server, code)


def job(**targets: Any) -> dict[str, Any]:
    """A scrape configuration."""
    return {"job_name": "transom", **targets}


class Traffic:
    """What it has not shown yet, on any page so far: series whose rates are of something, and panels by dashboard."""

    def __init__(self, pages: Prometheus) -> None:
        self._pages = pages
        self._scraped_s = 0.0
        self.rates = set(SHOWN)
        self.panels = {path: queries(json.loads(path.read_text()), path.stem) for path in DASHBOARDS}

    def has_shown_everything(self) -> bool:
        """Look at what is missing once for each page, at the time of its scrape."""
        at_s = self._pages.value(SCRAPED_S)
        if at_s != self._scraped_s:
            self._scraped_s = at_s
            self.rates = {one for one in self.rates if not self._pages.value(f"sum(rate({one}[1m]))", at_s=at_s) > 0}
            for missing in self.panels.values():
                missing -= {one for one in missing if shows_something(self._pages.query(one[1], at_s=at_s))}
        return not self.rates and not any(self.panels.values())


def queries(dashboard: dict[str, Any], stem: str) -> set[tuple[str, str]]:
    """Titles of panels with their queries, but for those that may be empty."""
    return {
        (title, substituted(expression, dashboard))
        for title, expression, _ in all_queries(dashboard)
        if (stem, title) not in MAY_BE_EMPTY
    }


def shows_something(series: list[dict[str, Any]]) -> bool:
    """Whether there is a number among what a query found."""
    return any(math.isfinite(float(one["value"][1])) for one in series)


def substituted(expression: str, dashboard: dict[str, Any]) -> str:
    """As Grafana sends it, with all of every variable chosen."""
    expression = expression.replace("$__rate_interval", "1m").replace("$__range", "1m").replace("$__interval", "5s")
    for variable in dashboard.get("templating", {}).get("list", []):
        expression = re.sub(rf"\$\{{?{variable['name']}(:\w+)?\}}?(?!\w)", ".+", expression)
    assert "$" not in expression, expression
    return expression


def body(conversation: int, turn: int) -> dict[str, Any]:
    """A conversation's prompt grows from turn to turn, until a new one takes its place; every third request streams, every
    fourth draws lots."""
    name = f"{conversation} of round {turn // NUM_TURNS}"
    told = " ".join(f"Turn {i} of conversation {name} says so." for i in range(turn % 4 + 1))
    return {
        "prompt": f"All of them begin alike. {told}",
        "max_tokens": 24 + 8 * (turn % 3),
        "ignore_eos": True,
        "temperature": float(turn % 4 == 3),
        "seed": turn,
        "stream": turn % 3 == 0,
    }


async def press(url: str, until: Callable[[], bool], *, give_up_s: float = 240.0) -> int:
    """Clients that ask again and again until `until()` holds or time is up; how many answers came, all of them whole.

    `until` is called off the event loop, one call at a time.
    """
    turns = itertools.count()
    done = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=give_up_s) as client:

        async def ask() -> int:
            answered = 0
            while not done.is_set():
                turn = next(turns)
                reply = await client.post("/v1/completions", json=body(turn * 7 % NUM_CONVERSATIONS, turn))
                assert reply.status_code == 200, reply.text
                answered += 1
                await asyncio.sleep(PAUSE_S)
            return answered

        async def watch() -> None:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(give_up_s):
                        while not await asyncio.to_thread(until):
                            await asyncio.sleep(PERIOD_S)
            finally:
                done.set()

        watching = asyncio.create_task(watch())
        counts = await asyncio.gather(*(ask() for _ in range(NUM_CLIENTS)))
        await watching
    return sum(counts)


def test_the_traffic_does_everything(monitored: Monitored) -> None:
    assert monitored.traffic.rates == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_something(monitored: Monitored, path: Path) -> None:
    """At the time of one of the pages, that is: traffic goes on until all have."""
    assert monitored.traffic.panels[path] == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_has_values(monitored: Monitored, path: Path) -> None:
    for variable in json.loads(path.read_text()).get("templating", {}).get("list", []):
        query = variable.get("query")
        text = query.get("query", "") if isinstance(query, dict) else str(query)
        match = re.fullmatch(r"label_values\((.+), *(\w+)\)", text)
        if variable["type"] == "query":
            assert match, (variable["name"], text)
            selector = substituted(match[1], json.loads(path.read_text()))
            assert any(match[2] in series["metric"] for series in monitored.pages.query(selector)), text


def test_every_alert_is_looked_at(monitored: Monitored) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        monitored.pages.query(rule["expr"])  # valid

    def health() -> list[tuple[str, str]]:
        groups = monitored.pages.get("rules")["groups"]
        return [(rule["name"], rule["health"]) for group in groups for rule in group["rules"]]

    looked_at = look_until(health, lambda found: all(state != "unknown" for _, state in found))
    assert sorted(looked_at) == sorted((rule.get("alert") or rule["record"], "ok") for rule in rules)


def test_every_process_can_be_scraped_by_itself(monitored: Monitored) -> None:
    both = "count(count by (worker) (transom_requests_running)) + count(count by (router) (transom_router_waiting_requests))"

    def seen() -> tuple[set[str], int, float, float]:
        targets = monitored.processes.get("targets")["activeTargets"]
        instances = {target["labels"]["instance"] for target in targets}
        health = {target["health"] for target in targets}
        return health, len(instances), monitored.processes.value(both), monitored.pages.value(both)

    look_until(
        seen, lambda found: found == ({"up"}, 4, 4.0, 4.0)
    )  # two workers, two routers; a scrape may come too late


def test_exemplars_name_requests(monitored: Monitored) -> None:
    query = {"query": "transom_first_token_seconds_bucket", "start": "0", "end": "99999999999"}
    answer = HTTP.get(f"{monitored.pages.url}/api/v1/query_exemplars", params=query).json()
    ids = [one["labels"]["request_id"] for series in answer["data"] for one in series["exemplars"]]
    assert ids
    assert all(one.startswith("cmpl-") for one in ids)
