"""Every panel's and every alert's query on a real Prometheus, which scrapes a real server under traffic that does everything.

Two workers, two routers, windows over full layers, pools so small that requests are preempted and windows are given up.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pressure import press
from prometheus_server import Prometheus, prometheus
from server import Server, assert_ended_cleanly, look_until, start_server, stop_server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]  # one of them waits for the server and its traffic

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "dashboards" / "json").glob("*.json"))
ALERTS = ROOT / "deploy" / "monitoring" / "alerts.yml"
FLAGS = (
    *("--replicas", "2", "--max-replicas", "2", "--min-replicas", "2", "--router-replicas", "2"),
    *("--window", "24", "--window-pattern", "SF", "--block-size", "8", "--max-model-len", "256"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", "190KiB"),
)
SCRAPES = 8
OF_EACH_PROCESS = ("transom_kv_pool_bytes", "transom_router_waiting_requests")  # two workers, two routers
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


@dataclass(frozen=True, slots=True)
class Monitored:
    """A server and who scrapes it."""

    server: Server
    pages: Prometheus  # by one router's page
    processes: Prometheus  # process by process, as the router lists them
    at_s: float  # right after the traffic: later on, rates over the last minute would be of nothing


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Monitored]:
    command = [ROOT / "scripts" / "prometheus", "prometheus", "--offline"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    program = found.stdout.strip()
    folder = tmp_path_factory.mktemp("monitored")
    server = start_server(str(tiny_model), folder / "log", *FLAGS)
    try:
        by_page = [job(static_configs=[{"targets": [server.url.removeprefix("http://")]}])]
        by_process = [job(http_sd_configs=[{"url": f"{server.url}/metrics/sd", "refresh_interval": "1s"}])]
        with (
            prometheus(program, folder / "pages", by_page, rules=ALERTS) as pages,
            prometheus(program, folder / "processes", by_process) as processes,
        ):
            asyncio.run(press(server.url, lambda: not missing(pages)))
            assert missing(pages) == []
            yield Monitored(server, pages, processes, scraped_after(pages, time.time()))
    finally:
        code = stop_server(server)
    assert_ended_cleanly(server, code)


def job(**targets: Any) -> dict[str, Any]:
    """A scrape configuration."""
    return {"job_name": "transom", **targets}


def missing(pages: Prometheus) -> list[str]:
    """What the traffic has not shown yet."""
    if pages.value('sum_over_time(up{job="transom"}[5m])') < SCRAPES:
        return ["scrapes"]
    return [name for name in SHOWN if not pages.value(f"sum(rate({name}[1m]))") > 0]


def scraped_after(pages: Prometheus, then_s: float) -> float:
    """When a page was read later than `then_s`, on which none of the processes is missing because it was slow."""
    scraped_s = 'timestamp(up{job="transom"}) and up{job="transom"} == 1'  # of anything but a selector it is the query's time

    def is_whole(at_s: float) -> bool:
        counts = [pages.value(f"count({name})", at_s=at_s) for name in OF_EACH_PROCESS]
        return at_s > then_s and counts == [2.0, 2.0]

    return look_until(lambda: pages.value(scraped_s), is_whole)


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All of them, those inside rows too."""
    for panel in dashboard["panels"]:
        yield from panel.get("panels", [])
        if panel["type"] != "row":
            yield panel


def substituted(expression: str, dashboard: dict[str, Any]) -> str:
    """As Grafana sends it, with all of every variable chosen."""
    expression = expression.replace("$__rate_interval", "1m").replace("$__range", "1m").replace("$__interval", "5s")
    for variable in dashboard.get("templating", {}).get("list", []):
        expression = re.sub(rf"\$\{{?{variable['name']}(:\w+)?\}}?(?!\w)", ".+", expression)
    assert "$" not in expression, expression
    return expression


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_something(monitored: Monitored, path: Path) -> None:
    dashboard = json.loads(path.read_text())
    empty = set()
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            series = monitored.pages.query(substituted(target["expr"], dashboard), at_s=monitored.at_s)
            numbers = [one["value"][1] for one in series]
            if not any(math.isfinite(float(number)) for number in numbers):
                empty.add((panel["title"], target["expr"]))
    assert {one for one in empty if (path.stem, one[0]) not in MAY_BE_EMPTY} == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_has_values(monitored: Monitored, path: Path) -> None:
    for variable in json.loads(path.read_text()).get("templating", {}).get("list", []):
        query = variable.get("query")
        text = query.get("query", "") if isinstance(query, dict) else str(query)
        match = re.fullmatch(r"label_values\((.+), *(\w+)\)", text)
        if variable["type"] == "query":
            assert match, (variable["name"], text)
            selector = substituted(match[1], json.loads(path.read_text()))
            assert any(
                match[2] in series["metric"] for series in monitored.pages.query(selector, at_s=monitored.at_s)
            ), text


def test_every_alert_is_looked_at(monitored: Monitored) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        monitored.pages.query(rule["expr"])  # valid
    looked_at = [rule for group in monitored.pages.get("rules")["groups"] for rule in group["rules"]]
    assert len(looked_at) == len(rules)
    assert [rule["name"] for rule in looked_at if rule["health"] == "err"] == []


def test_parts_add_up(monitored: Monitored) -> None:
    """Reasons to prompt tokens, states to pools, one page to all processes."""

    def value(expression: str) -> float:
        return monitored.pages.value(expression, at_s=monitored.at_s)

    assert value("sum(transom_prefix_tokens_total)") == value("sum(transom_prompt_tokens_total)") > 0
    used = "sum by (worker) (transom_kv_bytes)"
    assert value(f"count({used} <= on (worker) transom_kv_pool_bytes)") == 2


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
    answer = httpx.get(f"{monitored.pages.url}/api/v1/query_exemplars", params=query, timeout=60).json()
    ids = [one["labels"]["request_id"] for series in answer["data"] for one in series["exemplars"]]
    assert ids
    assert all(one.startswith("cmpl-") for one in ids)
