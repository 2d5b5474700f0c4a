"""The schemas take the manifests of deploy/ and find misspelt keys; and what the RayService sets beside its schema."""

import copy
from typing import Any

import pytest
import yaml

from tests.deploy.deploy_files import DEPLOY, document
from tests.deploy.resource_schemas import problems

RESOURCES = {
    "RayService": document(DEPLOY / "kuberay/rayservice.yaml"),
    **{one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "monitoring/monitors.yaml").read_text())},
    **{one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "gateway/pods.yaml").read_text())},
    "PrometheusRule": {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "transom"},
        "spec": document(DEPLOY / "monitoring/alerts.yml"),
    },
    "ConfigMap": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dashboard"}, "data": {"a": "b"}},
}


@pytest.mark.parametrize("kind", RESOURCES)
def test_they_take_what_is_there(kind: str) -> None:
    assert problems(RESOURCES[kind]) == []


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ("RayService spec.rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0", "resources"),
        ("PodMonitor spec.podMetricsEndpoints.0.relabelings.0", "regex"),
        ("Deployment spec.template.spec.containers.0", "readinessProbe"),
    ],
)
def test_misspelt_keys_are_caught(where: str, key: str) -> None:
    """`where` is a resource's kind, and the path of an object in it."""
    kind, path = where.split()
    resource = copy.deepcopy(RESOURCES[kind])
    parent: Any = resource
    for name in path.split("."):
        parent = parent[int(name) if name.isdigit() else name]
    parent[key[:-1]] = parent.pop(key)
    assert any(
        problem.startswith(f"{path}: ") and f"'{key[:-1]}' was unexpected" in problem for problem in problems(resource)
    )


@pytest.fixture
def service() -> dict[str, Any]:
    found: dict[str, Any] = document(DEPLOY / "kuberay/rayservice.yaml")
    return found


def groups(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_pods_hold_no_root_and_all_use_the_token(service: dict[str, Any]) -> None:
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert all(group["template"]["spec"]["securityContext"]["runAsNonRoot"] for group in groups(service))


def test_pods_agree_on_the_environment(service: dict[str, Any]) -> None:
    """The periods are those of `ray up`'s nodes."""
    shell = (DEPLOY / "node/env.sh").read_text()
    for group in groups(service):
        for one in group["template"]["spec"]["containers"][0]["env"]:
            assert one["name"] in ("HF_HOME", "TRITON_CACHE_DIR") or f"{one['name']}={one['value']}" in shell
