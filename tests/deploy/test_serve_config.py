"""The Serve configs validate against Ray's schema and our settings; misspelt keys of every level are errors."""

import copy
import re
from typing import Any

import pytest
import yaml

from tests.deploy.deploy_files import DEPLOY, document, serve_problems
from transom_core.settings.settings import Settings

COMMENTED = re.compile(r"^(\s+)# (\w+): ([^#]+)")


def embedded() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(document(DEPLOY / "kuberay/rayservice.yaml")["spec"]["serveConfigV2"])
    return config


CONFIGS = {"serve.yaml": document(DEPLOY / "serve.yaml"), "rayservice.yaml": embedded()}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return copy.deepcopy(CONFIGS[request.param])


def test_a_config_is_valid_for_ray_and_for_us(config: dict[str, Any]) -> None:
    assert serve_problems(config) == []


def test_misspelt_keys_are_caught(config: dict[str, Any]) -> None:
    app = config["applications"][0]
    config["http_option"] = config.pop("http_options")
    app["route_prefx"] = app.pop("route_prefix")
    app["deployments"][0]["ray_actor_option"] = app["deployments"][0].pop("ray_actor_options")
    app["deployments"].append({"name": "Wroker"})
    app["args"]["port"] = 8000
    assert len(serve_problems(config)) == 5


def test_options_in_comments_are_settings_as_well() -> None:
    """What serve.yaml offers in comments can be taken out of them, all at once."""
    offered = [found for line in (DEPLOY / "serve.yaml").read_text().splitlines() if (found := COMMENTED.match(line))]
    values = {found[2]: yaml.safe_load(found[3]) for found in offered}
    assert {"tensor_parallel_size", "routing_policy", "max_replicas", "api_key_file"} <= set(values)
    Settings.parse(model="smollm2", **values)
