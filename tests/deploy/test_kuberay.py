"""What the RayService sets beside its schema: a user that is not root, the token, and the periods of `ray up`'s nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.deploy_files import DEPLOY, document


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
