"""Adapts the interval of Serve's control loop: short while something starts or stops, long while nothing changes.

Serve's controller compares what should run with what runs, in a loop, ten times a second. Each start of a replica takes several
rounds, so that shorter intervals start a server faster, while an idle controller with this interval takes 2 to 3 % of a core.
With the longer interval the controller still checks each replica every `app.HEALTH_CHECK_PERIOD_S`.

Serve calls `adapt_interval` in the controller's process, where RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

BUSY_INTERVAL_S = 0.05
STEADY_INTERVAL_S = 0.5

# Of applications and of deployments, in Serve's words: nothing has to be started or stopped.
STEADY_STATES = frozenset({"RUNNING", "HEALTHY", "DEPLOY_FAILED"})

Step = Callable[..., Coroutine[Any, Any, None]]

logger = logging.getLogger("ray.serve")


def adapt_interval() -> None:
    """Let the control loop of this process's controller choose its interval after each round."""
    from ray.serve._private import controller

    controller.ServeController.run_control_loop_step = adaptive(
        controller.ServeController.run_control_loop_step, controller
    )


def adaptive(step: Step, module: Any) -> Step:
    """Return a method for a controller that runs `step`, and then sets `module.CONTROL_LOOP_INTERVAL_S`."""
    default_s = module.CONTROL_LOOP_INTERVAL_S

    async def run(self: Any, *args: Any) -> None:
        await step(self, *args)
        try:
            interval_s = STEADY_INTERVAL_S if is_steady(self) else BUSY_INTERVAL_S
        except Exception:  # the loop must go on
            logger.exception("The controller's state cannot be read.")
            interval_s = default_s
        module.CONTROL_LOOP_INTERVAL_S = interval_s

    return run


def is_steady(controller: Any) -> bool:
    """Whether there is an application, and no application or deployment of the controller changes."""
    applications = controller.application_state_manager.list_app_statuses().values()
    deployments = controller.deployment_state_manager.get_deployment_statuses()
    states = {one.status.value for one in [*applications, *deployments]}
    return bool(states) and states <= STEADY_STATES
