"""The schemas take the manifests of deploy/, and they find mistakes: misspelt keys, wrong values, keys that are missing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.deploy.deploy_files import DEPLOY, document
from tests.deploy.resource_schemas import problems

RESOURCES = {
    "RayService": document(DEPLOY / "kuberay/rayservice.yaml"),
    **{one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "monitoring/monitors.yaml").read_text())},
    "PrometheusRule": {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "transom"},
        "spec": document(DEPLOY / "monitoring/alerts.yml"),
    },
    "ConfigMap": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dashboard"}, "data": {"a": "b"}},
}
HEAD = "RayService spec.rayClusterConfig.headGroupSpec"
GROUP = "RayService spec.rayClusterConfig.workerGroupSpecs.0"
CONTAINER = f"{GROUP}.template.spec.containers.0"


def broken(where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a resource, to be changed, and the object in it that `kind path` names."""
    kind, path = where.split()
    resource = copy.deepcopy(RESOURCES[kind])
    found: Any = resource
    for key in path.split("."):
        found = found[int(key) if key.isdigit() else key]
    return resource, found


@pytest.mark.parametrize("kind", RESOURCES)
def test_they_take_what_is_there(kind: str) -> None:
    assert problems(RESOURCES[kind]) == []


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ("RayService spec", "rayClusterConfig"),
        ("RayService spec", "serveConfigV2"),
        ("RayService spec.upgradeStrategy", "type"),
        ("RayService metadata", "name"),
        (GROUP, "minReplicas"),
        (f"{GROUP}.template.spec.securityContext", "runAsNonRoot"),
        (CONTAINER, "resources"),
        (f"{HEAD}.template.spec.containers.0", "volumeMounts"),
        ("ServiceMonitor spec.selector", "matchExpressions"),
        ("ServiceMonitor spec.endpoints.0", "interval"),
        ("PodMonitor spec.podMetricsEndpoints.0.relabelings.0", "regex"),
        ("PrometheusRule spec.groups.0.rules.0", "expr"),
        ("ConfigMap metadata", "name"),
    ],
)
def test_misspelt_keys_are_caught(where: str, key: str) -> None:
    resource, parent = broken(where)
    parent[key[:-1]] = parent.pop(key)
    path = where.split()[1]
    assert any(
        problem.startswith(f"{path}: ") and f"'{key[:-1]}' was unexpected" in problem for problem in problems(resource)
    )


@pytest.mark.parametrize(
    ("where", "key", "wrong"),
    [
        ("RayService spec", "rayClusterDeletionDelaySeconds", "120"),
        ("RayService spec.rayClusterConfig.authOptions", "mode", "tokens"),
        (f"{HEAD}.rayStartParams", "metrics-export-port", 8080),
        (f"{CONTAINER}.ports.0", "containerPort", "8080"),
        (f"{CONTAINER}.env.0", "value", 5000),
        (f"{CONTAINER}.resources.limits", "memory", "48GiB"),
        ("ServiceMonitor spec.endpoints.0", "interval", "5 s"),
        ("ServiceMonitor spec.endpoints.0.authorization.credentials", "key", 1),
        ("PodMonitor spec.podMetricsEndpoints.0.relabelings.0", "action", "keeps"),
        ("PrometheusRule spec.groups.0.rules.0", "labels", ["severity"]),
        ("ConfigMap data", "a", 1),
    ],
)
def test_wrong_values_are_caught(where: str, key: str, wrong: object) -> None:
    resource, parent = broken(where)
    parent[key] = wrong
    path = where.split()[1]
    assert any(problem.startswith(f"{path}.{key}: {wrong!r} ") for problem in problems(resource))


@pytest.mark.parametrize(
    ("where", "key"),
    [("RayService spec", "rayClusterConfig"), (GROUP, "template"), (f"{GROUP}.template.spec", "containers")],
)
def test_missing_keys_are_caught(where: str, key: str) -> None:
    resource, parent = broken(where)
    del parent[key]
    assert problems(resource) == [f"{where.split()[1]}: {key!r} is a required property"]
