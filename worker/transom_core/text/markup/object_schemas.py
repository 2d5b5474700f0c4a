"""Reads objects and choices from a JSON schema, for grammars of markup whose arguments are not JSON.

Such a grammar enforces types, properties, listed values, choices (`anyOf`, `oneOf`), `allOf`, references, and the lengths, patterns
and formats of strings. A schema with a keyword that the grammar cannot enforce (`_NOT_HELD`) is refused by an error that names the
keyword, so that no answer satisfies less than its schema demands. Whatever stands beside a choice or a reference holds for each
choice (`_alternatives`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transom_core.errors import RequestError
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.schema_types import (
    JSON_TYPES,
    json_type,
    keyword_value,
    referenced,
    schema_types,
    type_names,
)

_ROOT = "whole-document"  # the name under which `with_definitions` puts a copy of the document into the definitions
_MAX_ALTERNATIVES = 32  # kinds of objects of one schema; nested choices multiply, and each kind becomes a rule
_MAX_PARTS = 2_000  # schemas of all kinds of values of one schema, each counted in every kind that it is a part of
_MAX_DEPTH = 16  # how deeply choices and references may be inside each other
_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_NEVER_HELD = ("not", "if", "$dynamicRef", "$recursiveRef")
_NOT_HELD = (
    *_NEVER_HELD, "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties",
)  # fmt: skip
_NOT_FOLDED = ("prefixItems", "additionalItems", "unevaluatedItems", "contains")
KEYWORDS_OF = {
    "string": ("maxLength", "minLength", "pattern", "format"),
    "number": ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "array": ("items", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", *_NOT_FOLDED),
    "object": ("properties", "required", "additionalProperties", *_NOT_HELD[len(_NEVER_HELD):], "allOf"),
}  # fmt: skip
"""JSON type -> the keywords that say which of its values are allowed. Other keywords, such as `title`, are annotations."""
_CONSTRAINTS = ("const", "enum", *chain.from_iterable(KEYWORDS_OF.values()))


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


def object_schemas(lark: LarkText, schema: Any, root: Mapping[str, Any]) -> list[ObjectSchema]:
    """Return the kinds of objects that `schema` allows.

    Raises:
        RequestError: the schema has a keyword that a grammar of this markup cannot enforce, or too many alternatives.
    """
    kinds = _kinds(lark, schema, root)
    kinds = [parts for parts in kinds if all("object" in schema_types(part, root) for part in parts)]
    if not kinds:
        raise RequestError("A tool's schema, or a part of it, allows no object; mend it.", param="tools")
    if len(kinds) > _MAX_ALTERNATIVES:
        raise RequestError(
            f"A tool's schema is a choice between {len(kinds)} kinds of objects and {_MAX_ALTERNATIVES} are allowed; name fewer.",
            param="tools",
        )
    return [_merged(lark, parts) for parts in kinds]


def value_choices(lark: LarkText, schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that `schema` is a choice between; `schema` itself if it is not a choice.

    Raises:
        RequestError: as `object_schemas` does.
    """
    choices = [folded for parts in _kinds(lark, schema, root) if (folded := _folded(parts)) is not None]
    choices = [choice for choice in choices if listed_values(choice) != []]
    if not choices:
        raise RequestError("A tool's schema has a part that no value satisfies; mend it.", param="tools")
    return choices


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that `schema` lists (`const`, `enum`) and its `type` allows; None if it lists none."""
    values = keyword_value(schema, "enum", list)
    if "const" in schema:
        const, given = schema["const"], [schema["const"]] if values is None else values
        values = [each for each in given if (each, json_type(each)) == (const, json_type(const))]
    if values is None:
        return None
    names = type_names(schema) or JSON_TYPES
    values = [value for value in values if json_type(value) in names or ("integer" in names and _is_integer(value))]
    for kind in sorted(set(map(json_type, values))):
        refuse_keywords(schema, KEYWORDS_OF.get(kind, ()))
    return values


def _is_integer(value: Any) -> bool:
    return json_type(value) == "number" and (isinstance(value, int) or value.is_integer())


def of_type(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return `schema` restricted to `kind`, one of its JSON types; a schema for integers stays one if `kind` is "number"."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    is_integer = kind == "number" and "integer" in names and "number" not in names
    return {**schema, "type": "integer" if is_integer else kind}


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema`, a part of the document `root`, as a document of its own: with a copy of `root` if it has references."""
    moved = _moved(schema)
    return schema if moved == schema else {**moved, "$defs": {_ROOT: _moved(root)}}


def _moved(value: Any) -> Any:
    """Return a part of a schema with its references into the document redirected to the document's copy in the definitions."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    moved = {name: _moved(each) for name, each in value.items()}
    if isinstance(reference := value.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return moved


def refuse_keywords(schema: Mapping[str, Any], keywords: tuple[str, ...] = _NOT_HELD) -> None:
    """Raise RequestError if `schema` has one of `keywords`."""
    found = [keyword for keyword in keywords if keyword in schema]
    if found:
        raise RequestError(
            f"A tool's schema has {found[0]!r}, which this model's markup for calls cannot be held to; leave it out, or set strict "
            "to false.",
            param="tools",
        )


def _kinds(lark: LarkText, schema: Any, root: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return what `_alternatives` returns, and count how much a reader of all parts reads."""
    kinds = _alternatives(lark, schema, root)
    values = (value for parts in kinds for part in parts for value in part.values())
    lark.count_read(sum(len(value) for value in values if isinstance(value, list | Mapping)))
    return kinds


def _alternatives(
    lark: LarkText, schema: Any, root: Mapping[str, Any], depth: int = 0
) -> list[list[Mapping[str, Any]]]:
    """Return, for each kind of value that `schema` allows, the schemas that such a value must all satisfy.

    These have no references and combinations. Example: the two kinds of `{"maxLength": 9, "anyOf": [A, {"$ref": B}]}` are
    `[{"maxLength": 9}, A]` and `[{"maxLength": 9}, {}, B]`.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(
            f"A tool's schema has choices or references in each other, deeper than {_MAX_DEPTH}; make it flatter.",
            param="tools",
        )
    if isinstance(schema, bool):
        return [[{}]] if schema else []
    if not isinstance(schema, Mapping):
        raise _not_a_schema(schema)
    lark.count_read(1 + len(schema))
    # Of each group, a value satisfies one schema.
    groups = [[part] for part in keyword_value(schema, "allOf", list) or ()]
    if (reference := keyword_value(schema, "$ref", str)) is not None:
        groups.append([referenced(reference, root)])
    groups += [choices for name in ("anyOf", "oneOf") if (choices := keyword_value(schema, name, list))]
    own = {keyword: value for keyword, value in schema.items() if keyword not in _COMBINATIONS}
    kinds: list[list[Mapping[str, Any]]] = [[own]]
    for group in groups:
        others = [parts for choice in group for parts in _alternatives(lark, choice, root, depth + 1)]
        num_parts = len(others) * sum(map(len, kinds)) + len(kinds) * sum(map(len, others))
        if num_parts > _MAX_PARTS:
            raise RequestError(
                f"A tool's schema is a choice that has more than {_MAX_PARTS:,} parts when it is written out; name fewer.",
                param="tools",
            )
        kinds = [parts + more for parts in kinds for more in others]
    return kinds


def _folded(parts: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return one schema for the values that satisfy all `parts`; None if their types exclude each other.

    What `parts` say about objects stays apart, in `allOf`. Any other keyword may differ in no two of them.
    """
    for part in parts:
        refuse_keywords(part, _NEVER_HELD)
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return parts[0] if parts else {}
    of_arrays = [part for part in parts if not part.keys().isdisjoint(KEYWORDS_OF["array"])]
    for part in of_arrays if len(of_arrays) > 1 else ():  # the meaning of these depends on the others, such as `items`
        refuse_keywords(part, _NOT_FOLDED)
    folded: dict[str, Any] = {}
    of_objects: list[dict[str, Any]] = []
    for part in parts:
        own = {keyword: value for keyword, value in part.items() if keyword not in KEYWORDS_OF["object"]}
        others = {keyword: value for keyword, value in part.items() if keyword in KEYWORDS_OF["object"]}
        refuse_keywords(
            own, tuple(name for name in _CONSTRAINTS if name in own and folded.get(name, own[name]) != own[name])
        )
        names = _common_types(type_names(folded), type_names(part))
        if names == frozenset():
            return None
        folded |= own if names is None else {**own, "type": sorted(names), "nullable": False}
        of_objects += [others] if others and others not in of_objects else []
    return {**folded, **(of_objects[0] if len(of_objects) == 1 else {"allOf": of_objects} if of_objects else {})}


def _common_types(names: frozenset[str] | None, more: frozenset[str] | None) -> frozenset[str] | None:
    """Return the types that both allow; None stands for all types."""
    if names is None or more is None:
        return more if names is None else names
    numbers = {"integer", "number"}
    are_integers = "integer" in names | more and names & numbers and more & numbers
    return names & more | ({"integer"} if are_integers else set())


def _merged(lark: LarkText, schemas: list[Mapping[str, Any]]) -> ObjectSchema:
    """Return the kind of object that satisfies all `schemas`.

    Raises:
        RequestError: one schema requires a property that another forbids.
    """
    required: set[str] = set()
    for schema in schemas:
        refuse_keywords(schema)
        required.update(_required(schema))
    declared = [keyword_value(schema, "properties", dict) or {} for schema in schemas]
    extras = [
        True if schema.get("additionalProperties") is None else schema["additionalProperties"] for schema in schemas
    ]
    names = dict.fromkeys([*chain.from_iterable(declared), *sorted(required)])
    lark.count_read(len(names) * len(schemas))
    properties = {
        name: _all_of([own.get(name, extra) for own, extra in zip(declared, extras, strict=True)]) for name in names
    }
    if forbidden := [name for name in sorted(required) if properties[name] is False]:
        raise RequestError(
            f"A tool's schema requires {forbidden[0][:80]!r}, which its 'additionalProperties' or 'properties' forbid; mend it.",
            param="tools",
        )
    properties = {name: schema for name, schema in properties.items() if schema is not False}
    return ObjectSchema(properties, frozenset(required), _all_of(extras))


def _all_of(schemas: list[Any]) -> Any:
    """Return one schema for the values that satisfy all `schemas`."""
    if any(schema is False for schema in schemas):
        return False
    distinct: list[Any] = []
    for schema in schemas:
        if not isinstance(schema, Mapping | bool):
            raise _not_a_schema(schema)
        if schema is not True and schema not in distinct:
            distinct.append(schema)
    return {"allOf": distinct} if len(distinct) > 1 else distinct[0] if distinct else True


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = keyword_value(schema, "required", list) or []
    if not all(isinstance(name, str) for name in names):
        raise RequestError("A tool's schema has 'required' that is not an array of names; mend it.", param="tools")
    return names


def _not_a_schema(value: Any) -> RequestError:
    return RequestError(
        f"A tool's schema has {json.dumps(value)[:80]} instead of a schema, or a '$ref' to a part that it does not have.",
        param="tools",
    )
