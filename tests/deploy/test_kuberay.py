"""The RayService validates against KubeRay's CRD, and its pods against Kubernetes' schemas; misspelt keys are errors."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.deploy_files import CRDS, DEPLOY, document
from tests.deploy.strict_schema import strict

VERSION = "1.34"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    versions = document(CRDS / "rayservices.yaml")["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    closed = strict(schema)
    closed["properties"]["metadata"] = {"type": "object"}  # the API server's own business
    return jsonschema.Draft202012Validator(closed)


@pytest.fixture
def service() -> dict[str, Any]:
    return copy.deepcopy(document(DEPLOY / "kuberay/rayservice.yaml"))


def problems(validator: jsonschema.Draft202012Validator, service: dict[str, Any]) -> list[str]:
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(service)]


def groups(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def validate_pod(template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_crd_takes_it(validator: jsonschema.Draft202012Validator, service: dict[str, Any]) -> None:
    assert problems(validator, service) == []


@pytest.mark.parametrize("key", ["rayClusterConfig", "upgradeStrategy", "serveConfigV2"])
def test_misspelt_keys_are_caught(
    validator: jsonschema.Draft202012Validator, service: dict[str, Any], key: str
) -> None:
    service["spec"][key[:-1]] = service["spec"].pop(key)
    assert any(key[:-1] in problem for problem in problems(validator, service))


def test_misspelt_keys_of_groups_are_caught(
    validator: jsonschema.Draft202012Validator, service: dict[str, Any]
) -> None:
    groups(service)[1]["minReplica"] = groups(service)[1].pop("minReplicas")
    assert any("minReplica" in problem for problem in problems(validator, service))


def test_kubernetes_takes_the_pods(service: dict[str, Any]) -> None:
    for group in groups(service):
        validate_pod(group["template"])


def test_misspelt_keys_of_pods_are_caught(service: dict[str, Any]) -> None:
    for group in groups(service):
        group["template"]["spec"]["containers"][0]["resourcs"] = {}
        with pytest.raises(kubernetes_validate.ValidationError, match="resourcs"):
            validate_pod(group["template"])


def test_pods_hold_no_root_and_all_use_the_token(service: dict[str, Any]) -> None:
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert all(group["template"]["spec"]["securityContext"]["runAsNonRoot"] for group in groups(service))


def test_pods_agree_on_the_environment(service: dict[str, Any]) -> None:
    """The periods are those of `ray up`'s nodes."""
    shell = (DEPLOY / "node/env.sh").read_text()
    for group in groups(service):
        for one in group["template"]["spec"]["containers"][0]["env"]:
            assert one["name"] == "HF_HOME" or f"{one['name']}={one['value']}" in shell
