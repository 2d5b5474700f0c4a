"""What is wrong with a Kubernetes resource, by the schemas of `custom_resources.yaml` or else by those of Kubernetes.

A field that a schema does not name is an error here, while the API server drops it silently.
"""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

CUSTOM_RESOURCES = Path(__file__).with_name("custom_resources.yaml")
# The types of Kubernetes 1.34, in the package kubernetes_validate.
DEFINITIONS = "kubernetes-json-schema/v1.34.0-local-strict/_definitions.json"
CORE = "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.core.v1."
APPS = CORE.replace(".core.", ".apps.")
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
# Kubernetes' definition of a quantity takes every text. This one is in every CRD that has a quantity.
QUANTITY_SCHEMA = {
    "type": ["integer", "string"],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
}


def problems(resource: dict[str, Any]) -> list[str]:
    """`path: message` for each violation of the schema of the resource's kind."""
    errors = _validator(resource["kind"]).iter_errors(resource)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    custom = yaml.safe_load(CUSTOM_RESOURCES.read_text())
    schema = _closed(custom[kind]) if kind in custom else {"$ref": (APPS if kind == "Deployment" else CORE) + kind}
    return jsonschema.Draft202012Validator(schema, registry=_kubernetes())


@cache
def _kubernetes() -> Registry[Any]:
    """Kubernetes' own types, by the `$id` that the references name."""
    definitions = json.loads(files("kubernetes_validate").joinpath(DEFINITIONS).read_text())
    definitions["$defs"][QUANTITY] = QUANTITY_SCHEMA
    return Resource.from_contents(definitions) @ Registry()


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object whose properties are named."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    names_properties = schema.get("type") == "object" and "properties" in schema
    return {**closed, "additionalProperties": False} if names_properties else closed
