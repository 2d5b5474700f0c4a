"""The files of deploy/ as documents, and the checks of Serve configs: Ray's schema, the deployments' keys, our settings."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from transom_cluster.app import SERVE_PROXY_SETTINGS
from transom_core.settings.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
DEPLOYMENTS = {"Router", "Worker"}


def document(path: Path) -> Any:
    """The only document of a YAML file."""
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


def serve_problems(config: dict[str, Any]) -> list[str]:
    """What is wrong with a Serve config of ours. Ray itself says nothing about keys that it does not know."""
    problems = []
    try:
        ServeDeploySchema.model_validate(config, extra="forbid")
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    for app in config["applications"]:
        names = {one["name"] for one in app.get("deployments", [])}
        problems += [f"deployments.name {name!r} is none of {sorted(DEPLOYMENTS)}" for name in names - DEPLOYMENTS]
        problems += [
            f"args.{name} is {SERVE_PROXY_SETTINGS[name]}" for name in SERVE_PROXY_SETTINGS if name in app["args"]
        ]
    if not problems:
        for app in config["applications"]:
            Settings.parse(**app["args"])
    return problems
