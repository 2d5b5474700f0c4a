"""Queries of dashboards and alerts: PromQL, over metrics that exist, by labels that these have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES
from scripts.metrics_page import router_families

from tests.dashboards.dashboard_files import all_queries, dashboards, variables
from tests.dashboards.promql import OF_A_HISTOGRAM, Named, kept_labels, named
from tests.engine_driver import make_engine

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/monitoring/alerts.yml"
PROMETHEUS_OWN = {  # what Prometheus makes itself
    "up": {"job", "instance"},
    "ALERTS": {"alertname", "alertstate", "severity", "model", "worker"},
}
RAYS_OWN = {f"ray_{name}": {"instance", *gauge.view.columns} for name, gauge in METRICS_GAUGES.items()}  # its agents'
NOT_ON_A_DASHBOARD: dict[str, str] = {}  # metric: why


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


RECORDED = {rule["record"]: {"model"} for rule in rules() if "record" in rule}
QUERIES = [
    *((f"{board['uid']}: {panel}", expr) for board in dashboards() for panel, expr, _ in all_queries(board)),
    *((f"alerts: {rule.get('alert') or rule['record']}", rule["expr"]) for rule in rules()),
]


@pytest.fixture(scope="module")
def series(tiny_model: Path) -> dict[str, set[str]]:
    """Every metric by the name that Prometheus shows, with its labels: of a live engine and of a router."""
    engine = make_engine(str(tiny_model))
    found: dict[str, set[str]] = {}
    for family in (*engine.metrics.registry.collect(), *router_families()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.setdefault(name, set()).update(label for one in family.samples for label in one.labels if label != "le")
    engine.shutdown()
    return found


def base(metric: str, series: dict[str, set[str]]) -> str:
    """The metric that a series belongs to."""
    stems = [metric.removesuffix(end) for end in OF_A_HISTOGRAM if metric.endswith(end)]
    return next((stem for stem in stems if stem in series), metric)


def problems(one: Named, series: dict[str, set[str]]) -> list[str]:
    known = {**series, **RECORDED, **PROMETHEUS_OWN, **RAYS_OWN}
    name = base(one.metric, series)
    if name not in known:
        return [f"{one.metric} is no metric"]
    allowed = known[name] | ({"le"} if one.metric.endswith("_bucket") else set())
    return [f"{one.metric} has no label {label}" for label in sorted(one.labels - allowed)]


@pytest.mark.parametrize(("where", "expr"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_query_names_what_exists(where: str, expr: str, series: dict[str, set[str]]) -> None:
    selectors = named(expr)
    assert selectors, f"{where} reads no metric"
    assert [problem for one in selectors for problem in problems(one, series)] == []


@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board["uid"])
def test_legends_name_labels_that_the_query_keeps(board: dict[str, object]) -> None:
    for panel, expr, legend in all_queries(board):
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept_labels(expr) | {"le"}, panel


@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board["uid"])
def test_queries_use_the_variables_that_are_shown_and_no_others(board: dict[str, object]) -> None:
    text = " ".join(expr for _, expr, _ in all_queries(board))
    used = {name for name in ("model", "worker", "router", "group") if f"${name}" in text}
    assert used == {name for name, is_hidden in variables(board).items() if not is_hidden} - {"datasource"}


def test_every_metric_is_on_a_dashboard(series: dict[str, set[str]]) -> None:
    shown = {base(one.metric, series) for where, expr in QUERIES if "alerts" not in where for one in named(expr)}
    assert set(series) - shown == set(NOT_ON_A_DASHBOARD)
