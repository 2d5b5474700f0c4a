"""Prometheus' configuration: its structure, and what promtool says where it is installed. What
`deploy/monitoring/kubernetes.py` prints: by the operator's CRDs, by Kubernetes' schemas, and against the RayService."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.deploy_files import DEPLOY, document
from tests.deploy.resource_schemas import problems
from tests.prometheus_programs import run_promtool

MONITORING = DEPLOY / "monitoring"
PATH = MONITORING / "prometheus.yml"
LARGE = MONITORING / "prometheus_large.yml"


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_jobs_have_targets_and_rules_exist(path: Path) -> None:
    """The keys are checked by promtool."""
    config = document(path)
    assert all("static_configs" in job or "http_sd_configs" in job for job in config["scrape_configs"])
    assert [job["job_name"] for job in config["scrape_configs"]] == ["transom", "ray"]
    assert all((MONITORING / name).exists() for name in config["rule_files"])


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_promtool_takes_it(path: Path) -> None:
    run_promtool("check", "config", "--syntax-only", path)


def test_the_two_differ_only_in_how_processes_are_found() -> None:
    few, many = ({job["job_name"]: job for job in document(path)["scrape_configs"]} for path in (PATH, LARGE))
    assert few["ray"] == many["ray"]
    assert few["transom"]["authorization"] == many["transom"]["authorization"]
    (discovery,) = many["transom"]["http_sd_configs"]
    assert discovery["authorization"] == few["transom"]["authorization"]
    assert discovery["url"].endswith("/metrics/sd")


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_every_key_says_that_it_is_a_bearers(path: Path) -> None:
    """Prometheus 2.42 sends discovery's key bare where no type is written, and gets 401."""
    jobs = document(path)["scrape_configs"]
    parts = [*jobs, *(discovery for job in jobs for discovery in job.get("http_sd_configs", []))]
    types = [part["authorization"].get("type") for part in parts if "authorization" in part]
    assert set(types) == {"Bearer"}
    assert all("authorization" in part for part in parts if "url" in part)


BYTES_OF_A_CONFIG_MAP = 1 << 20


def printed(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(DEPLOY / "monitoring/kubernetes.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return printed("--namespace", "models", "--label", "release=stack", "--runbooks", "https://host/")


def test_schemas_take_everything(found: list[dict[str, Any]]) -> None:
    assert [problem for one in found for problem in problems(one)] == []
    assert [one["kind"] for one in found] == ["ServiceMonitor", "PodMonitor", "PrometheusRule"] + ["ConfigMap"] * 4


def test_every_object_has_the_labels_that_selectors_look_for(found: list[dict[str, Any]]) -> None:
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


def is_selected(labels: Mapping[str, str], selector: dict[str, Any]) -> bool:
    """Whether a ServiceMonitor takes a service with these labels."""
    exists = [one["key"] for one in selector["matchExpressions"] if one["operator"] == "Exists"]
    assert len(exists) == len(selector["matchExpressions"])
    return selector["matchLabels"].items() <= labels.items() and set(exists) <= set(labels)


def services(name: str, clusters: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The labels of the services that KubeRay (1.5 and newer) makes for a RayService, by the services' names.

    The first cluster takes requests, a second one is on its way in or out. Each service leads to a head: two of them to that of
    the first cluster, which has one of its own too.
    """
    kuberay = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator"}
    own = {"ray.io/originated-from-cr-name": name, "ray.io/originated-from-crd": "RayService"}
    made = {f"{name}-serve-svc": {**own, "ray.io/serve": f"{name}-serve"}}
    for head in (name, *clusters):
        of_cluster = own if head == name else {**kuberay, "ray.io/cluster": head}
        made[f"{head}-head-svc"] = {**of_cluster, "ray.io/node-type": "head", "ray.io/identifier": f"{head}-head"}
    return made


@pytest.mark.parametrize("clusters", [("transom-a1b2c",), ("transom-a1b2c", "transom-x8y9z")], ids=["one", "upgrade"])
def test_every_head_is_scraped_through_one_service(found: list[dict[str, Any]], clusters: tuple[str, ...]) -> None:
    monitor = found[0]["spec"]
    (endpoint,) = monitor["endpoints"]
    keep = endpoint["relabelings"][0]
    label = keep["sourceLabels"][0].removeprefix("__meta_kubernetes_service_label_")
    ray = document(DEPLOY / "kuberay/rayservice.yaml")
    made = services(ray["metadata"]["name"], clusters)
    taken = {name: labels for name, labels in made.items() if is_selected(labels, monitor["selector"])}
    kept = [name for name, labels in taken.items() if re.fullmatch(keep["regex"], _metas(labels)[label])]
    assert kept == [f"{cluster}-head-svc" for cluster in clusters]
    (head,) = ray["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert endpoint["port"] in {"metrics", *(port["name"] for port in head["ports"])}


def test_other_clusters_are_left_alone(found: list[dict[str, Any]]) -> None:
    keeps = [found[0]["spec"]["endpoints"][0], found[1]["spec"]["podMetricsEndpoints"][0]]
    for regex in (one["relabelings"][0]["regex"] for one in keeps):
        assert re.fullmatch(regex, "transom-a1b2c")
        assert not re.fullmatch(regex, "another-a1b2c")


def test_rays_pages_are_those_of_all_pods(found: list[dict[str, Any]]) -> None:
    cluster = document(DEPLOY / "kuberay/rayservice.yaml")["spec"]["rayClusterConfig"]
    specs = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    ports = [{port["name"] for port in spec["containers"][0]["ports"]} for spec in specs]
    (endpoint,) = found[1]["spec"]["podMetricsEndpoints"]
    assert all(endpoint["port"] in names for names in ports)


def _metas(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels by the names that Prometheus' discovery gives them."""
    return {re.sub(r"[^A-Za-z0-9_]", "_", name): value for name, value in labels.items()}
