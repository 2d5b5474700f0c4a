"""Turns a CRD's schema into a JSON schema that refuses unknown fields, which the API server would drop silently."""

from __future__ import annotations

from typing import Any

KEPT_AS_THEY_ARE = {"enum", "default", "required"}


def strict(schema: Any) -> Any:
    """The schema with its Kubernetes extensions resolved: int-or-string, nullable, unknown fields."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    resolved = {key: value if key in KEPT_AS_THEY_ARE else strict(value) for key, value in schema.items()}
    if resolved.pop("x-kubernetes-int-or-string", False):
        resolved.pop("anyOf", None)
        resolved["type"] = ["integer", "string"]
    if _is_closed(resolved):
        resolved["additionalProperties"] = False
    if resolved.pop("nullable", False) and isinstance(resolved.get("type"), str):
        resolved["type"] = [resolved["type"], "null"]
    return resolved


def _is_closed(schema: dict[str, Any]) -> bool:
    """Whether it names all fields that an object may have."""
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    return is_object and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
