"""What `deploy/monitoring/kubernetes.py` prints: by the operator's CRDs, by Kubernetes' schemas, and against the RayService."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deploy_files import CRDS, DEPLOY, document
from strict_schema import strict

FILES = {"PodMonitor": "podmonitors.yaml", "PrometheusRule": "prometheusrules.yaml"}
BYTES_OF_A_CONFIG_MAP = 1 << 20


def printed(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, DEPLOY / "monitoring/kubernetes.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return printed("--namespace", "models", "--label", "release=stack", "--runbooks", "https://host/")


def problems(one: dict[str, Any]) -> list[str]:
    if one["kind"] not in FILES:
        kubernetes_validate.validate(one, "1.34", strict=True)
        return []
    (version,) = [v for v in document(CRDS / FILES[one["kind"]])["spec"]["versions"] if v["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own business
    errors = jsonschema.Draft202012Validator(schema).iter_errors(one)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


def test_schemas_take_everything(found: list[dict[str, Any]]) -> None:
    assert [problem for one in found for problem in problems(one)] == []
    assert [one["kind"] for one in found] == ["PodMonitor"] * 2 + ["PrometheusRule"] + ["ConfigMap"] * 4


def test_misspelt_keys_are_caught(found: list[dict[str, Any]]) -> None:
    monitor = json.loads(json.dumps(found[0]))
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "5s"
    assert any("intervall" in problem for problem in problems(monitor))


def test_everything_is_labelled_for_whoever_looks_for_it(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["metadata"]["namespace"] == "models"
        assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "transom"
        wanted = ("grafana_dashboard", "1") if one["kind"] == "ConfigMap" else ("release", "stack")
        assert wanted in one["metadata"]["labels"].items()


def test_rules_and_dashboards_are_those_of_the_files(found: list[dict[str, Any]]) -> None:
    groups = document(DEPLOY / "monitoring/alerts.yml")["groups"]
    assert [group["name"] for group in found[2]["spec"]["groups"]] == [group["name"] for group in groups]
    urls = {
        rule["annotations"]["runbook_url"]
        for group in found[2]["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert all(url.startswith("https://host/docs/monitoring.md#") for url in urls)
    for one in found[3:]:
        ((name, text),) = one["data"].items()
        assert json.loads(text)["uid"] == name.removesuffix(".json")
        assert len(text.encode()) < BYTES_OF_A_CONFIG_MAP


def test_monitors_name_ports_and_labels_that_the_pods_have(found: list[dict[str, Any]]) -> None:
    service = document(DEPLOY / "kuberay/rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    specs = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    ports = [{port["name"] for port in spec["containers"][0]["ports"]} for spec in specs]
    (of_routers,), (of_ray,) = (one["spec"]["podMetricsEndpoints"] for one in found[:2])
    assert of_routers["port"] in ports[0]
    assert all(of_ray["port"] in names for names in ports)
    for endpoint in (of_routers, of_ray):
        assert endpoint["relabelings"][0]["regex"] == f"{service['metadata']['name']}-.+"


def test_without_flags_nothing_is_added() -> None:
    for one in printed():
        assert "namespace" not in one["metadata"]
        assert "release" not in one["metadata"]["labels"]
