"""Every cluster YAML validates against Ray's schema and has what Transom needs besides."""

import copy
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.deploy.deploy_files import DEPLOY, document

PATHS = sorted(DEPLOY.glob("*/cluster.yaml"))
CLOUDS = [path for path in PATHS if path.parent.name != "on_premise"]


@pytest.fixture(params=PATHS, ids=lambda path: path.parent.name)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = document(request.param)
    return found


def validate(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` does before it does anything."""
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_takes_it(config: dict[str, Any]) -> None:
    validate(config)


def test_commands_have_the_environment_and_the_head_no_resources_for_workers(config: dict[str, Any]) -> None:
    """The token, the mode and the periods must be the same everywhere, and no dashboard is opened."""
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert all(command.startswith(". ~/transom/env.sh;") for command in starts)
    assert config["file_mounts"] == {"~/transom": "node"}
    assert "--num-cpus=0 --num-gpus=0" in config["head_start_ray_commands"][-1]
    assert "--dashboard-host" not in "".join(config["head_start_ray_commands"])


def test_hosts_install_what_was_tested_and_what_triton_needs(config: dict[str, Any]) -> None:
    setup = "\n".join(config["setup_commands"])
    assert "pip install --quiet -c ~/transom/constraints.txt ~/transom/transom-*.whl" in setup
    assert config["provider"]["type"] == "local" or "install gcc python3-dev python3-venv" in setup


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.parent.name)
def test_autoscaler_limits_hold_together(path: Path) -> None:
    cloud = document(path)
    types = validate(cloud)["available_node_types"]
    assert types.pop(cloud["head_node_type"])["resources"] == {"CPU": 0, "GPU": 0}
    for host in types.values():
        assert 0 <= host["min_workers"] <= host["max_workers"] <= cloud["max_workers"]
        assert host["resources"]["GPU"] >= 1


def test_only_the_api_is_opened_on_aws() -> None:
    """Ray adds what the cluster's own hosts need, and ssh."""
    opened = document(DEPLOY / "aws/cluster.yaml")["provider"]["security_group"]["IpPermissions"]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in opened] == [(8000, 8000)]
    assert all(where["CidrIp"] != "0.0.0.0/0" for rule in opened for where in rule["IpRanges"])
