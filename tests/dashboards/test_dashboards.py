"""The dashboards as files: equal to the code, explained, and linked. Queries of dashboards and alerts:
PromQL, over metrics that exist, by labels that these have. Alert rules: valid and tested by promtool where there is one, and
complete in what they tell the person on call."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from dashboards.build import documents
from tests.dashboards.dashboard_files import FOLDER, all_queries, dashboards, panels, variables
from tests.dashboards.promql import OF_A_HISTOGRAM, Named, kept_labels, named
from tests.engine_driver import make_engine
from tests.prometheus_programs import run_promtool
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.router_state import RouterState
from transom_core.settings.settings import Settings

BOARDS = dashboards()
EACH = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
RUNBOOKS = (ROOT / "docs/monitoring.md").read_text()
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ALERT_RULES = [rule for rule in RULES if "alert" in rule]
EACH_ALERT = pytest.mark.parametrize(
    "rule", ALERT_RULES, ids=lambda rule: rule["alert"] + rule["labels"].get("speed", "")
)


def test_the_files_are_what_the_code_makes() -> None:
    """Another text here means: run `make dashboards`."""
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == documents()


@EACH
def test_every_panel_has_its_own_title_and_says_what_to_do(board: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        shows, act = panel["description"].split("\n\n**When it looks wrong:** ")
        assert min(len(shows), len(act)) > 10, panel["title"]
        assert all(text.endswith(".") for text in (shows, act)), panel["title"]


@EACH
def test_panels_lead_to_other_dashboards(board: dict[str, Any]) -> None:
    targets = [link["url"] for panel in panels(board) for link in panel.get("links", [])]
    uids = {other["uid"] for other in BOARDS}
    assert {target.split("?")[0].removeprefix("/d/") for target in targets} <= uids - {board["uid"]}


HAVE_EXEMPLARS = {"transom_router_first_token_seconds_bucket", "transom_router_request_seconds_bucket"}


@EACH
def test_dots_are_asked_for_where_buckets_name_requests(board: dict[str, Any]) -> None:
    """Range queries over a histogram of a router, whose ids open at `/debug/requests`; the panel's words tell of them."""
    for panel in panels(board):
        asking = [target for target in panel["targets"] if target["exemplar"]]
        assert bool(asking) == bool(re.search(r"[Dd]ots are", panel["description"])), panel["title"]
        for target in asking:
            assert (panel["type"], target.get("range"), target.get("instant")) == ("timeseries", True, False)
            assert {name for name in HAVE_EXEMPLARS if name in target["expr"]}, panel["title"]


@EACH
def test_words_name_flags_and_alerts_that_exist(board: dict[str, Any]) -> None:
    flags = {name.replace("_", "-") for name in Settings.model_fields}
    alerts = {rule["alert"] for rule in ALERT_RULES}
    text = " ".join(panel["description"] for panel in panels(board))
    assert set(re.findall(r"--([a-z-]+)", text)) <= flags
    assert set(re.findall(r"Transom[A-Z]\w+", text)) <= alerts


def test_words_name_panels_that_exist() -> None:
    """`*Panel*` or `*Section*` in a description; `*Dashboard, Panel*` in the documents."""
    titles = {board["title"].removeprefix("Transom / "): {one["title"] for one in board["panels"]} for board in BOARDS}
    for board in BOARDS:
        own = titles[board["title"].removeprefix("Transom / ")]
        for panel in panels(board):
            named = set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", panel["description"]))
            assert named <= own | set(titles), panel["title"]
    documents = " ".join(page.read_text() for page in sorted((FOLDER.parents[1] / "docs").glob("*.md")))
    for board_title, panel_title in re.findall(r"\*([A-Z][\w ]+), ([A-Z][^*\n]+)\*", documents):
        assert board_title not in titles or panel_title in titles[board_title], panel_title


PROMETHEUS_OWN = {  # what Prometheus makes itself
    "up": {"job", "instance"},
    "ALERTS": {"alertname", "alertstate", "severity", "model", "worker"},
}
RAYS_OWN = {f"ray_{name}": {"instance", *gauge.view.columns} for name, gauge in METRICS_GAUGES.items()}  # its agents'
NOT_ON_A_DASHBOARD: dict[str, str] = {}  # metric: why


RECORDED = {rule["record"]: {"model"} for rule in RULES if "record" in rule}
QUERIES = [
    *((f"{board['uid']}: {panel}", expr) for board in BOARDS for panel, expr, _ in all_queries(board)),
    *((f"alerts: {rule.get('alert') or rule['record']}", rule["expr"]) for rule in RULES),
]


def router_families() -> list[Metric]:
    """All that a router can show."""
    state = RouterState(
        num_waiting=0,
        num_tasks=0,
        workers_by_state={"open": 1, "closed": 0, "draining": 0},
        in_flight_by_worker={"w": 0},
        workers_by_identity={"0123": 1},
        desired_workers=1,
    )
    metrics = RouterMetrics("r", model="m", state=lambda: state)
    metrics.requests.of("/v1/completions", "200")
    metrics.routing.joined("kv", "w")
    metrics.routing.mirror_changed("w", num_blocks=0, version=0)
    return list(metrics.registry.collect())


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


@EACH
def test_legends_name_labels_that_the_query_keeps(board: dict[str, object]) -> None:
    for panel, expr, legend in all_queries(board):
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept_labels(expr) | {"le"}, panel


@EACH
def test_queries_use_the_variables_that_are_shown_and_no_others(board: dict[str, object]) -> None:
    text = " ".join(expr for _, expr, _ in all_queries(board))
    used = {name for name in ("model", "worker", "router", "group") if f"${name}" in text}
    assert used == {name for name, is_hidden in variables(board).items() if not is_hidden} - {"datasource"}


def test_every_metric_is_on_a_dashboard(series: dict[str, set[str]]) -> None:
    shown = {base(one.metric, series) for where, expr in QUERIES if "alerts" not in where for one in named(expr)}
    assert set(series) - shown == set(NOT_ON_A_DASHBOARD)


def test_the_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", MONITORING / "alerts_test.yml")


def test_every_alert_is_seen_firing_in_a_test() -> None:
    tests = (MONITORING / "alerts_test.yml").read_text()
    fired = set(re.findall(r'alertname="(\w+)"', tests)) | set(re.findall(r"alertname: (\w+)\n\s+eval_time", tests))
    assert fired == {rule["alert"] for rule in ALERT_RULES}


@EACH_ALERT
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "for" in rule
    assert set(rule["annotations"]) == {"summary", "description", "action", "runbook_url"}
    for name in ("summary", "description", "action"):
        assert rule["annotations"][name].endswith("."), name


@EACH_ALERT
def test_an_alert_leads_to_its_runbook(rule: dict[str, Any]) -> None:
    assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"
    section = RUNBOOKS.split(f"\n### {rule['alert']}\n")[1].split("\n### ")[0]
    assert len(section) > 100


def test_runbooks_belong_to_alerts() -> None:
    assert set(re.findall(r"\n### (Transom\w+)\n", RUNBOOKS)) == {rule["alert"] for rule in ALERT_RULES}
