"""Schemas that are too much to compile, or that no grammar can hold."""

import json
from typing import Any


def _deep(levels: int) -> str:
    """Too deep for Python's json: the text is written by hand."""
    return '{"type":"object","properties":{"a":' * levels + '{"type":"string"}' + "}}" * levels


def _products(groups: int, alternatives: int) -> dict[str, Any]:
    """All combinations of one alternative of each group."""

    def objects(i: int) -> list[dict[str, Any]]:
        return [{"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(alternatives)]

    return {"allOf": [{"anyOf": objects(i)} for i in range(groups)]}


TOO_MUCH: dict[str, Any] = {
    "very deep": _deep(10_000),
    "a huge enumeration": {"enum": [f"value {i}" for i in range(60_000)]},
    "combinations": _products(6, 4),
    "a large common multiple": {"type": "integer", "allOf": [{"multipleOf": p} for p in (101, 103, 107, 109)]},
    "disjoint names": {"patternProperties": {f"^p{i}[a-z]+$": {"type": "integer"} for i in range(2_000)}},
    "many alternatives": {
        "anyOf": [{"properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(10_000)]
    },
    "a loop": {"$ref": "#"},
    "a longer loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
}
"""Refused, by a limit or because no answer exists."""

LARGE: dict[str, Any] = {
    "2,000 properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}},
    "5,000 required properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(5_000)},
        "required": [f"p{i}" for i in range(5_000)],
        "additionalProperties": False,
    },
    "a long string": {"type": "string", "minLength": 1_000_000},
    "many numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000, "maxItems": 10**9},
    "a recursive tree": {
        "$defs": {"t": {"type": "object", "properties": {side: {"$ref": "#/$defs/t"} for side in ("left", "right")}}},
        "$ref": "#/$defs/t",
    },
    "much choice in a pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
    "nested repetition": {"type": "string", "pattern": "^(a{1000}){1000}$"},
}
"""Compiled; answers to them are held, or end with an error."""


def grammar(schema: Any) -> str:
    return "start: %json " + (schema if isinstance(schema, str) else json.dumps(schema))
