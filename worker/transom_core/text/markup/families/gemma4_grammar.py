"""Makes grammars for Gemma 4's notation of a call's arguments, so that these are valid against the tool's schema.

Properties come in alphabetical order, regardless of case, as the models' chat template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.object_schemas import (
    ObjectSchema,
    listed_values,
    object_schemas,
    of_type,
    refuse_keywords,
    value_choices,
    with_definitions,
)
from transom_core.text.markup.schema_types import schema_types
from transom_core.text.markup.string_grammar import string_expression

QUOTE = '<|"|>'
_NAMES = re.compile(r'[^:{}\[\],"<>\s]+')
_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def object_expression(lark: LarkText, schema: Mapping[str, Any]) -> str:
    """Return a grammar's expression for the arguments of a call, with their braces.

    Raises:
        RequestError: as `object_schemas` does.
    """
    return _Notation(lark, schema).object(schema)


class _Notation:
    """Writes the rules for one schema, `root`."""

    def __init__(self, lark: LarkText, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root
        self._rules: dict[str, str] = {}  # a schema's JSON -> its rule, so that a schema may contain itself

    def object(self, schema: Any) -> str:
        """Return an expression for an object."""
        kinds = [self._members(kind) for kind in object_schemas(schema, self._root)]
        return "({})".format(" | ".join(f'"{{" {members} "}}"' for members in kinds))

    def value(self, schema: Any) -> str:
        """Return a rule for a value of any kind that the schema allows."""
        key = json.dumps(schema, sort_keys=True, default=str)
        if key not in self._rules:
            self._rules[key] = self._lark.rule_name("value")
            choices = [choice for each in value_choices(schema, self._root) for choice in self._choices(each)]
            self._lark.define(self._rules[key], " | ".join(choices))
        return self._rules[key]

    def _choices(self, schema: Mapping[str, Any]) -> Iterator[str]:
        listed = listed_values(schema)
        if listed is not None:
            yield from (self._listed(value) for value in listed)
            return
        types = schema_types(schema, self._root)
        if "string" in types:
            yield f"{self._lark.marker(QUOTE)} {string_expression(self._lark, schema, end=QUOTE)}"
        if "object" in types:
            yield self.object(schema)
        if "array" in types:
            yield self._array(schema)
        for kind in sorted(types & {"number", "boolean", "null"}):
            yield self._lark.json(with_definitions(of_type(schema, kind), self._root))

    def _array(self, schema: Mapping[str, Any]) -> str:
        refuse_keywords(schema, ("prefixItems", "contains", "uniqueItems", "unevaluatedItems"))
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self.value(schema.get("items", True))
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){times}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _members(self, schema: ObjectSchema) -> str:
        """Return an expression for the members between an object's braces."""
        schema = schema.with_names(_NAMES)
        if not schema.properties:
            if schema.additional is False:
                return ""
            return f"({self._lark.terminal('name', _NAME)} {self._lark.literal(':')} {self.value(schema.additional)})?"
        names = sorted(schema.properties, key=lambda name: (name.lower(), name))
        members = [f"{self._lark.literal(name + ':')} {self.value(schema.properties[name])}" for name in names]
        heads: list[str] = []
        rest = ""  # expression for the members after this one, each with its comma
        for name, member in reversed(list(zip(names, members, strict=True))):
            is_required = name in schema.required
            heads = [f"{member} {rest}"] + ([] if is_required else heads)
            rest = self._lark.rule("members", f'"," {member} {rest}' if is_required else f'("," {member})? {rest}')
        return f"({' | '.join(heads)}){'' if schema.required else '?'}"

    def _listed(self, value: Any) -> str:
        """Return an expression for exactly this value."""
        if isinstance(value, str):
            text = self._lark.literal(value) if value else ""
            return f"{self._lark.marker(QUOTE)} {text} {self._lark.marker(QUOTE)}"
        if isinstance(value, list):
            return '"[" {} "]"'.format(' "," '.join(map(self._listed, value)))
        if isinstance(value, Mapping):
            members = [f"{self._lark.literal(name + ':')} {self._listed(each)}" for name, each in value.items()]
            return '"{{" {} "}}"'.format(' "," '.join(members))
        return self._lark.literal(json.dumps(value))
