"""The interval of the controller's loop follows what it has to do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import controller as serve_controller
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


def controller(applications: list[ApplicationStatus], deployments: list[DeploymentStatus]) -> Any:
    by_name = {str(i): SimpleNamespace(status=status) for i, status in enumerate(applications)}
    infos = [SimpleNamespace(status=status) for status in deployments]
    return SimpleNamespace(
        application_state_manager=SimpleNamespace(list_app_statuses=lambda: by_name),
        deployment_state_manager=SimpleNamespace(get_deployment_statuses=lambda: infos),
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
    assert is_steady(controller(applications, deployments)) is steady


def test_the_interval_after_each_round() -> None:
    rounds: list[tuple[object, ...]] = []
    module = SimpleNamespace(CONTROL_LOOP_INTERVAL_S=0.1)

    async def step(self: object, *args: object) -> None:
        rounds.append((self, *args))

    run = adaptive(step, module)
    steady = controller([RUNNING], [HEALTHY])
    asyncio.run(run(steady, 1, 2, 3))
    assert module.CONTROL_LOOP_INTERVAL_S == STEADY_INTERVAL_S
    asyncio.run(run(controller([], []), 4, 5, 6))
    assert module.CONTROL_LOOP_INTERVAL_S == BUSY_INTERVAL_S
    asyncio.run(run(SimpleNamespace(), 7, 8, 9))
    assert module.CONTROL_LOOP_INTERVAL_S == 0.1  # Serve's own, where the state cannot be read
    assert [args for _, *args in rounds] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert rounds[0][0] is steady


def test_the_controller_of_the_installed_serve_has_what_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = serve_controller.ServeController.run_control_loop_step
    monkeypatch.setattr(serve_controller.ServeController, "run_control_loop_step", original)
    adapt_interval()
    assert serve_controller.ServeController.run_control_loop_step is not original
    assert isinstance(serve_controller.CONTROL_LOOP_INTERVAL_S, float)
    known = {status.value for kind in (ApplicationStatus, DeploymentStatus) for status in kind}
    assert known >= STEADY_STATES
