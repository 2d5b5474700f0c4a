"""Reads objects and choices from a JSON schema, for grammars of markup whose arguments are not JSON.

Such a grammar enforces types, properties, listed values, choices (`anyOf`, `oneOf`), references, and the lengths and patterns of
strings. A schema with a keyword that the grammar cannot enforce (`_NOT_HELD`) is refused by an error that names the keyword, so
that no answer satisfies less than its schema demands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.errors import RequestError
from transom_core.text.markup.schema_types import resolved, schema_types

_DEFINITIONS = ("$defs", "definitions")
_ROOT = "whole-document"  # the name under which `with_definitions` puts a copy of the document into the definitions
_MAX_ALTERNATIVES = 32  # kinds of objects of one schema; nested choices multiply, and each kind becomes a rule
_MAX_DEPTH = 8  # how deeply choices may be inside choices
_NOT_HELD = (
    "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObjectSchema:
    """One kind of object: its properties, the required ones, and the schema of additional properties (False: none are allowed)."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    additional: Any

    def with_names(self, pattern: re.Pattern[str]) -> ObjectSchema:
        """Return the object without the properties that a markup cannot write, because their names do not match `pattern`.

        Raises:
            RequestError: such a property is required.
        """
        names = [name for name in self.properties if not pattern.fullmatch(name)]
        for name in names:
            if name in self.required:
                raise RequestError(
                    f"A tool has an argument named {name!r}, which this model's markup for calls cannot write; use letters, digits "
                    "and '_'.",
                    param="tools",
                )
        properties = {name: schema for name, schema in self.properties.items() if name not in names}
        return ObjectSchema(properties, self.required, self.additional if properties or not names else False)


def object_schemas(schema: Any, root: Mapping[str, Any]) -> list[ObjectSchema]:
    """Return the kinds of objects that `schema` allows.

    Raises:
        RequestError: the schema has a keyword that a grammar of this markup cannot enforce, or too many alternatives.
    """
    found = []
    for parts in _alternatives(schema, root, 0):
        found.append(_merged(parts))
        if len(found) > _MAX_ALTERNATIVES:
            raise RequestError(
                f"A tool's schema is a choice between more than {_MAX_ALTERNATIVES} kinds of objects; name fewer."
            )
    return found


def value_choices(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that `schema` is a choice between; `schema` itself if it is not a choice."""
    schema = resolved(schema, root)
    refuse_keywords(schema, ("not", "if", "allOf"))
    choices = _choices(schema)
    if not choices:
        yield schema
    if depth > _MAX_DEPTH:
        raise RequestError(f"A tool's schema has choices in choices, deeper than {_MAX_DEPTH}; make it flatter.")
    for choice in choices:
        yield from value_choices(choice, root, depth + 1)


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that `schema` lists (`const`, `enum`); None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def of_type(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return `schema` restricted to `kind`, one of its JSON types; a schema for integers stays one if `kind` is "number"."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    is_integer = kind == "number" and "integer" in names and "number" not in names
    return {**schema, "type": "integer" if is_integer else kind}


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema`, a part of the document `root`, as a document of its own: with the definitions that its references need."""
    if not any(_references(schema)):
        return schema
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    if not any(map(_points_elsewhere, _references((schema, definitions)))):
        return {**definitions, **schema}
    moved: Mapping[str, Any] = _moved({**definitions, **schema})
    return {**moved, "$defs": {**moved.get("$defs", {}), _ROOT: _moved(root)}}


def _points_elsewhere(reference: str) -> bool:
    """Return whether a reference points into the document, but not into its definitions."""
    return reference.startswith("#") and not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _references(each)


def _moved(value: Any) -> Any:
    """Return a part of a schema with its references into the document redirected to the document's copy in the definitions."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    moved = {name: _moved(each) for name, each in value.items()}
    if isinstance(reference := value.get("$ref"), str) and _points_elsewhere(reference):
        moved["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return moved


def refuse_keywords(schema: Mapping[str, Any], keywords: tuple[str, ...] = _NOT_HELD) -> None:
    """Raise RequestError if `schema` has one of `keywords`."""
    found = [keyword for keyword in keywords if keyword in schema]
    if found:
        raise RequestError(
            f"A tool's schema has {found[0]!r}, which this model's markup for calls cannot be held to; leave it out, or set strict "
            "to false."
        )


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [choice for name in ("anyOf", "oneOf") for choice in schema.get(name) or ()]


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[list[Mapping[str, Any]]]:
    """Yield, for each kind of object, the schemas that such an object must all satisfy."""
    schema = resolved(schema, root)
    refuse_keywords(schema)
    own = [schema]
    for part in schema.get("allOf") or ():
        part = resolved(part, root)
        refuse_keywords(part, (*_NOT_HELD, "anyOf", "oneOf", "allOf"))
        own.append(part)
    choices = _choices(schema)
    if depth > _MAX_DEPTH:
        raise RequestError(f"A tool's schema has choices in choices, deeper than {_MAX_DEPTH}; make it flatter.")
    if not choices:
        yield own
    for choice in choices:
        for parts in _alternatives(choice, root, depth + 1):
            if all("object" in schema_types(part, root) for part in parts):
                yield own + parts


def _merged(schemas: list[Mapping[str, Any]]) -> ObjectSchema:
    """Return the kind of object that satisfies all `schemas`."""
    required = frozenset(name for schema in schemas for name in schema.get("required") or ())
    properties: dict[str, Any] = {}
    for schema in schemas:
        properties |= schema.get("properties") or {}
    properties |= {name: True for name in sorted(required - properties.keys())}
    extras = [schema["additionalProperties"] for schema in schemas if "additionalProperties" in schema]
    additional = False if False in extras else next((extra for extra in extras if isinstance(extra, Mapping)), True)
    return ObjectSchema(properties, required, additional)
