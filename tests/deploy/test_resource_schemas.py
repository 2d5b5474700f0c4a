"""The schemas take the manifests of deploy/ and find misspelt keys; and what the RayService sets beside its schema."""

import json
from typing import Any

import pytest
import yaml

from tests.deploy.deploy_files import DEPLOY, document
from tests.deploy.resource_schemas import problems

RESOURCES: dict[str, Any] = {
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
CLUSTER = RESOURCES["RayService"]["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


@pytest.mark.parametrize("kind", RESOURCES)
def test_they_take_what_is_there(kind: str) -> None:
    assert problems(RESOURCES[kind]) == []


@pytest.mark.parametrize(("old", "new"), [('"resources"', '"resource"'), ('"upscalingMode"', '"upscaleMode"')])
def test_misspelt_keys_are_caught(old: str, new: str) -> None:
    """In a type of Kubernetes, and in a type of KubeRay."""
    resource = json.loads(json.dumps(RESOURCES["RayService"]).replace(old, new))
    assert any(f"{new.replace(chr(34), chr(39))} was unexpected" in problem for problem in problems(resource))


def test_pods_hold_no_root_and_all_use_the_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert all(group["template"]["spec"]["securityContext"]["runAsNonRoot"] for group in GROUPS)


def test_pods_agree_on_the_environment() -> None:
    """The periods are those of `ray up`'s nodes."""
    shell = (DEPLOY / "node/env.sh").read_text()
    for group in GROUPS:
        for one in group["template"]["spec"]["containers"][0]["env"]:
            assert one["name"] in ("HF_HOME", "TRITON_CACHE_DIR") or f"{one['name']}={one['value']}" in shell
