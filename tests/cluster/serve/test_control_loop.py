"""The interval of the controller's loop follows what it has to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import application_state, controller
from ray.serve._private.common import DeploymentStatus
from ray.serve.schema import ApplicationStatus

from transom_cluster.serve.control_loop import (
    BUSY_INTERVAL_S,
    STEADY_INTERVAL_S,
    STEADY_STATES,
    adapt_interval,
    adaptive,
    is_steady,
)


def manager(applications: list[ApplicationStatus], deployments: list[DeploymentStatus]) -> Any:
    by_name = {str(i): SimpleNamespace(status=status) for i, status in enumerate(applications)}
    infos = [SimpleNamespace(status=status) for status in deployments]
    return SimpleNamespace(
        list_app_statuses=lambda: by_name,
        _deployment_state_manager=SimpleNamespace(get_deployment_statuses=lambda: infos),
    )


RUNNING, HEALTHY = ApplicationStatus.RUNNING, DeploymentStatus.HEALTHY


@pytest.mark.parametrize(
    ("applications", "deployments", "steady"),
    [
        ([], [], False),
        ([ApplicationStatus.DEPLOYING], [], False),
        ([ApplicationStatus.DEPLOYING], [HEALTHY, HEALTHY], False),
        ([RUNNING], [HEALTHY, HEALTHY], True),
        ([RUNNING], [HEALTHY, DeploymentStatus.UPSCALING], False),
        ([RUNNING], [HEALTHY, DeploymentStatus.UNHEALTHY], False),  # a lost replica is being replaced
        ([ApplicationStatus.DEPLOY_FAILED], [DeploymentStatus.DEPLOY_FAILED], True),
    ],
)
def test_steady(applications: list[ApplicationStatus], deployments: list[DeploymentStatus], steady: bool) -> None:
    assert is_steady(manager(applications, deployments)) is steady


def test_the_interval_after_each_round() -> None:
    rounds: list[Any] = []
    module = SimpleNamespace(CONTROL_LOOP_INTERVAL_S=0.1)
    run = adaptive(rounds.append, module)
    steady, starting, strange = manager([RUNNING], [HEALTHY]), manager([], []), SimpleNamespace()
    run(steady)
    assert module.CONTROL_LOOP_INTERVAL_S == STEADY_INTERVAL_S
    run(starting)
    assert module.CONTROL_LOOP_INTERVAL_S == BUSY_INTERVAL_S
    run(strange)
    assert module.CONTROL_LOOP_INTERVAL_S == 0.1  # Serve's own, where the state cannot be read
    assert rounds == [steady, starting, strange]


def test_the_controller_of_the_installed_serve_has_what_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = application_state.ApplicationStateManager.update
    monkeypatch.setattr(application_state.ApplicationStateManager, "update", original)
    adapt_interval()
    assert application_state.ApplicationStateManager.update is not original
    assert isinstance(controller.CONTROL_LOOP_INTERVAL_S, float)
    known = {status.value for kind in (ApplicationStatus, DeploymentStatus) for status in kind}
    assert known >= STEADY_STATES
