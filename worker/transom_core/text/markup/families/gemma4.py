"""The parser `gemma4`: a call's arguments are an object in the model's own notation, with unquoted keys, and strings in `<|"|>`.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],at:{home:true}}<tool_call|>

Strings are raw: nothing is escaped in them. They go up to the next `<|"|>`, and other markers inside them are text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transom_core.errors import RequestError
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.json_reader import copy_string, read_string
from transom_core.text.markup.lark import LarkText, string_expression
from transom_core.text.markup.object_schemas import (
    ObjectSchema,
    listed_values,
    object_schemas,
    of_type,
    refuse_keywords,
    value_choices,
    with_definitions,
)
from transom_core.text.markup.parameters import quoted, typed_value
from transom_core.text.markup.reader import SPACE, MalformedMarkupError, Markers, MarkupReader, Reading
from transom_core.text.markup.schema_types import JSON_TYPES, keyword_value, schema_types
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_QUOTE = '<|"|>'
_CALL, _CALL_END = "<|tool_call>", "<tool_call|>"
_NAME_ENDS = Markers(["{", _CALL_END, _CALL])
_STRING_ENDS = Markers([_QUOTE])
_KEYS = re.compile(r'[^:{}\[\],"<>\s]+')
_MAX_DEPTH = 64  # values in each other; a document that the router takes has 50, but references may make more of it
_BARE = re.compile(r"[^,:{}\[\]]+")
_BARE_KEY = re.compile(r"[^:{}]+")


class Gemma4Tools(ToolMarkup):
    """Tool calls of Gemma 4."""

    openers = (_CALL,)
    markers = (_CALL_END, _QUOTE)
    separator = ""
    keeps_space = True

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one call."""
        reader = calls.reader
        yield from reader.skip_space()
        yield from reader.expect("call:")
        text, end = yield from reader.text_until(_NAME_ENDS)
        name = text.strip(SPACE)
        if end != "{" or not name or any(space in name for space in SPACE):
            raise MalformedMarkupError
        calls.begin(name)
        yield from _copy_object(calls)
        yield from reader.skip_space()
        yield from reader.expect(_CALL_END)
        calls.end()

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for a name and its arguments."""
        calls = [
            f"{lark.literal('call:' + tool.name)} {_Notation(lark, tool.parameters).object(tool.parameters)}"
            for tool in tools
        ]
        return f"({' | '.join(calls)}) {lark.marker(_CALL_END)}"


def _copy_object(calls: CallReading) -> Reading[None]:
    """Read the arguments after their `{`, nested objects and arrays included, and write them as JSON."""
    reader, write = calls.reader, calls.arguments
    write("{")
    closers = ["}"]  # closing brackets of the open objects and arrays, innermost last
    is_first = True
    while closers:
        yield from reader.skip_space()
        if (yield from reader.peek()) == closers[-1]:
            write(reader.take(1))
            closers.pop()
            is_first = False
            continue
        if not is_first:
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.peek()) == closers[-1]:  # a trailing comma
                continue
            write(", ")
        if closers[-1] == "}":
            write(quoted((yield from _read_key(reader))) + ": ")
            yield from reader.skip_space()
        first = yield from reader.peek()
        is_first = first in "{["
        if is_first:
            write(reader.take(1))
            closers.append("}" if first == "{" else "]")
        else:
            yield from _copy_value(calls)


def _read_key(reader: MarkupReader) -> Reading[str]:
    """Read a key and the colon after it, and return the key."""
    if (yield from reader.skip(_QUOTE)):
        key, _ = yield from reader.text_until(_STRING_ENDS)
    elif (yield from reader.peek()) == '"':
        key = yield from read_string(reader)
    else:
        key = (yield from reader.run(_BARE_KEY)).strip(SPACE)
    yield from reader.skip_space()
    yield from reader.expect(":")
    return key


def _copy_value(calls: CallReading) -> Reading[None]:
    """Read a string or an unquoted text, and write it as JSON; an unquoted text that is not JSON itself becomes a string."""
    reader, write = calls.reader, calls.arguments
    if (yield from reader.skip(_QUOTE)):
        write('"')
        yield from reader.until(_STRING_ENDS, lambda text: write(quoted(text)[1:-1]))
        write('"')
    elif (yield from reader.peek()) == '"':
        yield from copy_string(reader, write)
    else:
        text = yield from reader.run(_BARE)
        if (yield from reader.peek()) not in ",}]":
            raise MalformedMarkupError
        write(typed_value(text.strip(SPACE), JSON_TYPES))


class _Notation:
    """Writes a grammar's rules for one tool's arguments, so that these are valid against its schema `root`.

    Properties come in alphabetical order, regardless of case, as the models' chat template writes them.
    """

    def __init__(self, lark: LarkText, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root
        self._depth = 0  # values that are being written, each inside the previous one
        self._rules: dict[str, str] = {}  # a schema's JSON -> its rule, so that a schema may contain itself

    def object(self, schema: Any) -> str:
        """Return an expression for an object."""
        kinds = [self._members(kind) for kind in object_schemas(self._lark, schema, self._root)]
        return "({})".format(" | ".join(f'"{{" {members} "}}"' for members in kinds))

    def value(self, schema: Any) -> str:
        """Return a rule for a value of any kind that the schema allows."""
        key = json.dumps(schema, sort_keys=True, default=str)
        if key not in self._rules:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise RequestError(
                    f"A tool's schema has values in each other, deeper than {_MAX_DEPTH}.", param="tools"
                )
            self._rules[key] = self._lark.rule_name("value")
            choices = [
                choice for each in value_choices(self._lark, schema, self._root) for choice in self._choices(each)
            ]
            self._lark.define(self._rules[key], " | ".join(choices))
            self._depth -= 1
        return self._rules[key]

    def _choices(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield an expression for each listed value, or for each JSON type that the schema allows."""
        listed = listed_values(schema)
        if listed is not None:
            yield from (self._listed(value) for value in listed)
            return
        types = schema_types(schema, self._root)
        if "string" in types:
            yield f"{self._lark.marker(_QUOTE)} {string_expression(self._lark, schema, end=_QUOTE)}"
        if "object" in types:
            yield self.object(schema)
        if "array" in types:
            yield self._array(schema)
        for kind in sorted(types & {"number", "boolean", "null"}):
            yield self._lark.json(with_definitions(of_type(schema, kind), self._root))

    def _array(self, schema: Mapping[str, Any]) -> str:
        refuse_keywords(schema, ("prefixItems", "additionalItems", "contains", "uniqueItems", "unevaluatedItems"))
        if isinstance(schema.get("items"), list):  # a schema for each place, of which this grammar knows nothing
            refuse_keywords(schema, ("items",))
        least, most = keyword_value(schema, "minItems", int) or 0, keyword_value(schema, "maxItems", int)
        if most == 0:
            return '"[]"'
        item = self.value(schema.get("items", True))
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){times}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _members(self, schema: ObjectSchema) -> str:
        """Return an expression for the members between an object's braces."""
        schema = schema.with_names(_KEYS)
        if not schema.properties:
            if schema.additional is False:
                return ""
            name, value = self._lark.argument_name(), self.value(schema.additional)
            member = self._lark.rule("member", f"{name} {self._lark.literal(':')} {value}")
            return f'({member} ("," {member})*)?'
        names = sorted(schema.properties, key=lambda name: (name.lower(), name))
        members = [f"{self._lark.literal(name + ':')} {self.value(schema.properties[name])}" for name in names]
        # From the last member to the first. `heads` has an expression for each member that can be the first one written: a member
        # that comes after a required one cannot be.
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
            return f"{self._lark.marker(_QUOTE)} {text} {self._lark.marker(_QUOTE)}"
        if isinstance(value, list):
            return '"[" {} "]"'.format(' "," '.join(map(self._listed, value)))
        if isinstance(value, Mapping):
            members = [f"{self._lark.literal(name + ':')} {self._listed(each)}" for name, each in value.items()]
            return '"{{" {} "}}"'.format(' "," '.join(members))
        return self._lark.literal(json.dumps(value))
