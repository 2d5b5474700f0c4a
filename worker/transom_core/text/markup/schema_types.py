"""Finds the JSON types that a JSON schema allows, from its `type`, `enum`, `const`, references and combinations.

Markup that writes arguments as plain text needs this: only the tool's schema says whether the text `3` is a number or a string.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from transom_core.errors import RequestError

JSON_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})  # "number" stands for "integer", too
_MAX_DEPTH = 16  # references and combinations that are followed; a schema may refer to itself
_MAX_VISITED = 1_000  # schemas that are read to find one schema's types
_KINDS = {dict: "an object", list: "an array", str: "a string", int: "a whole number of at least 0"}

_Value = TypeVar("_Value")


def property_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types that a tool's schema `parameters` allows for the argument `name`; all types if it does not say.

    Of several parts that name it (`$ref`, `allOf`, `anyOf`, `oneOf`), these are the types that all of them allow, if there are any.
    """
    found: list[Any] = []
    todo: list[Any] = [parameters]
    references: set[str] = set()
    for _ in range(_MAX_VISITED):
        if not todo:
            break
        if not isinstance(part := todo.pop(), Mapping):
            continue
        if isinstance(properties := part.get("properties"), Mapping) and name in properties:
            found.append(properties[name])
        if isinstance(reference := part.get("$ref"), str) and reference not in references:
            references.add(reference)
            todo.append(referenced(reference, parameters))
        for combination in ("allOf", "anyOf", "oneOf"):
            todo += part[combination] if isinstance(part.get(combination), list) else []
    if not found:
        return schema_types(parameters.get("additionalProperties", True), parameters)
    types = schema_types({"allOf": found}, parameters)
    return types if types != JSON_TYPES or len(found) == 1 else schema_types({"anyOf": found}, parameters)


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that `schema` allows: those that its own keywords, its `$ref`, each of `anyOf` and `oneOf` (in any branch)
    and all parts of `allOf` allow. If these contradict each other, return all types. References point into the document `root`.

    Each reference is followed once. A reference inside its own target, and what is too deep or too much to read, allows all types.
    """
    of_reference: dict[str, frozenset[str]] = {}  # reference -> its types; all types while it is followed
    num_visited = 0

    def visit(schema: Any, depth: int) -> frozenset[str]:
        nonlocal num_visited
        num_visited += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or num_visited > _MAX_VISITED:
            return JSON_TYPES
        types = _own_types(schema)
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in of_reference:
                of_reference[reference] = JSON_TYPES
                of_reference[reference] = visit(referenced(reference, root), depth + 1)
            types &= of_reference[reference]
        for combination in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(combination), list) and choices:
                types &= frozenset().union(*(visit(choice, depth + 1) for choice in choices))
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= visit(part, depth + 1)
        return types or JSON_TYPES

    return visit(schema, 0)


def keyword_value(schema: Mapping[str, Any], name: str, kind: type[_Value]) -> _Value | None:
    """Return the value of the keyword `name`; None if `schema` does not have it, or has null.

    Raises:
        RequestError: the value is not of `kind`, which is one of `_KINDS`.
    """
    value = schema.get(name)
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is None or (is_number if kind is int else isinstance(value, kind)):
        return value
    raise RequestError(f"A tool's schema has {name!r} that is not {_KINDS[kind]}; mend it.", param="tools")


def json_type(value: Any) -> str:
    """Return the JSON type of a value that `json.loads` made."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset(map(json_type, values))
    return frozenset("number" if name == "integer" else name for name in type_names(schema) or JSON_TYPES)


def type_names(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that the keyword `type` names, "integer" among them; None if it names none."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    known = frozenset(name for name in names if isinstance(name, str)) & {*JSON_TYPES, "integer"}
    if not known:
        return None
    return known | {"null"} if schema.get("nullable") is True else known


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference like `#/$defs/city` points to; None if `root` has no such part."""
    found: Any = root if reference.startswith("#") else None
    for step in reference.removeprefix("#").strip("/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or (name and name not in found):
            return None
        found = found[name] if name else found
    return found
