"""Adapts the interval of Serve's control loop: short while something starts or stops, long while nothing changes.

Serve's controller compares what should run with what runs, in a loop, ten times a second. Each start of a replica takes several
rounds, so that shorter intervals start a server faster, while an idle controller with this interval takes 2 to 3 % of a core.
With the longer interval each round checks every replica, so that they are checked about every `app.HEALTH_CHECK_PERIOD_S`.

Serve calls `adapt_interval` in the controller's process, where RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

BUSY_INTERVAL_S = 0.05
# Serve draws each period of health checks between 0.9 and 1.1 of what is set, so every round has one.
STEADY_INTERVAL_S = 1.12

# Of applications and of deployments, in Serve's words: nothing has to be started or stopped.
STEADY_STATES = frozenset({"RUNNING", "HEALTHY", "DEPLOY_FAILED"})

logger = logging.getLogger("ray.serve")


def adapt_interval() -> None:
    """Let the control loop of this process's controller choose its interval in each round."""
    from ray.serve._private import application_state, controller

    manager = application_state.ApplicationStateManager
    manager.update = adaptive(manager.update, controller)


def adaptive(update: Callable[[Any], None], module: Any) -> Callable[[Any], None]:
    """Return a method for the manager of applications that runs `update`, and then sets `module.CONTROL_LOOP_INTERVAL_S`.

    The loop calls the manager's `update` in each round. The controller's own methods cannot be replaced: Ray has copied them into
    the actor's class when this runs.
    """
    default_s = module.CONTROL_LOOP_INTERVAL_S

    def run(manager: Any) -> None:
        update(manager)
        try:
            interval_s = STEADY_INTERVAL_S if is_steady(manager) else BUSY_INTERVAL_S
        except Exception:  # the loop must go on
            logger.exception("The controller's state cannot be read.")
            interval_s = default_s
        module.CONTROL_LOOP_INTERVAL_S = interval_s

    return run


def is_steady(manager: Any) -> bool:
    """Whether there is an application, and no application or deployment changes."""
    applications = manager.list_app_statuses().values()
    deployments = manager._deployment_state_manager.get_deployment_statuses()
    states = {one.status.value for one in [*applications, *deployments]}
    return bool(states) and states <= STEADY_STATES
