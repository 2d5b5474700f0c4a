"""Alert rules: valid and tested by promtool where there is one, and complete in what they tell the person on call."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus_programs import run_promtool

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
RUNBOOKS = (ROOT / "docs/monitoring.md").read_text()
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
EACH = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"] + rule["labels"].get("speed", ""))


def test_promtool_takes_the_rules() -> None:
    assert f"{len(RULES)} rules found" in run_promtool("check", "rules", MONITORING / "alerts.yml")


def test_the_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", MONITORING / "alerts_test.yml")


def test_every_alert_is_seen_firing_in_a_test() -> None:
    tests = (MONITORING / "alerts_test.yml").read_text()
    fired = set(re.findall(r'alertname="(\w+)"', tests)) | set(re.findall(r"alertname: (\w+)\n\s+eval_time", tests))
    assert fired == {rule["alert"] for rule in ALERTS}


@EACH
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "for" in rule
    assert set(rule["annotations"]) == {"summary", "description", "action", "runbook_url"}
    for name in ("summary", "description", "action"):
        assert rule["annotations"][name].endswith("."), name


@EACH
def test_an_alert_leads_to_its_runbook(rule: dict[str, Any]) -> None:
    assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"
    section = RUNBOOKS.split(f"\n### {rule['alert']}\n")[1].split("\n### ")[0]
    assert len(section) > 100


def test_runbooks_belong_to_alerts() -> None:
    assert set(re.findall(r"\n### (Transom\w+)\n", RUNBOOKS)) == {rule["alert"] for rule in ALERTS}
