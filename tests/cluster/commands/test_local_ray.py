"""What `transom serve` sets for the processes of Ray: names that the required version of Ray reads."""

from __future__ import annotations

import inspect

from ray.serve._private import constants

from transom_cluster.commands.local_ray import _ENVIRONMENT


def test_serve_reads_every_setting_of_serve() -> None:
    source = inspect.getsource(constants)
    assert [name for name in _ENVIRONMENT if name.startswith("RAY_SERVE_") and f'"{name}"' not in source] == []


def test_serve_gives_a_proxy_on_a_busy_machine_longer_than_its_imports_take() -> None:
    assert float(_ENVIRONMENT["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]) > constants.PROXY_READY_CHECK_TIMEOUT_S
