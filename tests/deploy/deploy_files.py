"""The files of deploy/ as documents, and the checks of Serve configs: Ray's schema, the deployments' keys, our settings."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from transom_cluster.app import SERVE_PROXY_SETTINGS
from transom_core.settings.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
DEPLOYMENTS = {"Router", "Worker"}


def document(path: Path) -> Any:
    """The only document of a YAML file."""
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


def serve_problems(config: dict[str, Any]) -> list[str]:
    """What is wrong with a Serve config of ours. Ray says nothing about keys that it does not know, so they are looked for here."""
    problems = [*_unknown(ServeDeploySchema, config, "")]
    for app in config.get("applications", []):
        problems += _unknown(ServeApplicationSchema, app, "applications.")
        problems += [p for one in app.get("deployments", []) for p in _deployment_problems(one)]
        problems += [
            f"args.{name} is {SERVE_PROXY_SETTINGS[name]}" for name in SERVE_PROXY_SETTINGS if name in app["args"]
        ]
    if not problems:
        ServeDeploySchema.model_validate(config)
        for app in config["applications"]:
            Settings.parse(**app["args"])
    return problems


def _deployment_problems(deployment: dict[str, Any]) -> list[str]:
    unknown = [*_unknown(DeploymentSchema, deployment, "deployments.")]
    name = deployment.get("name")
    return unknown if name in DEPLOYMENTS else [*unknown, f"deployments.name {name!r} is none of {sorted(DEPLOYMENTS)}"]


def _unknown(schema: type[BaseModel], given: dict[str, Any], prefix: str) -> list[str]:
    known = set(schema.model_fields)
    return [f"{prefix}{name} is no key of {schema.__name__}" for name in given if name not in known]
