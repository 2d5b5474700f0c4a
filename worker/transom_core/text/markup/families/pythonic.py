"""The parsers `pythonic` and `llama4_pythonic`: calls are written as a list of Python calls with named arguments.

    [get_weather(city='San Francisco', metric='celsius'), get_time()]

Without a marker, a list is calls if it begins the message and its first name is a tool's; other lists are the message. Llama 4 may
write `<|python_start|>` before the list and `<|python_end|>` after it; with this marker the list may come after text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.object_schemas import ObjectSchema, object_schemas, with_definitions
from transom_core.text.markup.python_literals import copy_literal
from transom_core.text.markup.reader import MalformedMarkupError, Reading
from transom_core.text.markup.tool_markup import BareToolMarkup, CallReading

_NAME = re.compile(r"[\w.-]*")
_ARGUMENT_NAME = re.compile(r"[\w.-]+")
_ESCAPES = 'nrtbf"\\u'  # characters after a backslash that mean the same in JSON and in Python


class PythonicTools(BareToolMarkup):
    """Tool calls written as Python."""

    starters = "["

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one list of calls."""
        reader = calls.reader
        yield from reader.skip_space()
        yield from calls.read_list(lambda: _read_call(calls, is_marked=bool(opener)))
        for end in self.markers:
            yield from reader.skip_space()
            yield from reader.skip(end)

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the whole list."""
        call = lark.rule("call", " | ".join(_call_rule(lark, tool) for tool in tools))
        return lark.list_of(call, has_several=parallel)


class Llama4Tools(PythonicTools):
    """Tool calls of Llama 4."""

    openers = ("<|python_start|>",)
    markers = ("<|python_end|>",)


def _read_call(calls: CallReading, *, is_marked: bool) -> Reading[None]:
    """Read one call, `name(key=value, ...)`. A trailing comma is allowed, as in Python."""
    reader = calls.reader
    name = yield from reader.run(_NAME)
    yield from reader.skip_space()
    yield from reader.expect("(")
    if not name or not (is_marked or name in calls.tools):
        raise MalformedMarkupError
    calls.begin(name)
    keys: set[str] = set()
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(")")):
            break
        if keys:
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.skip(")")):
                break
        key = yield from reader.run(_NAME)
        yield from reader.skip_space()
        if not key or key in keys or (yield from reader.peek()) != "=":
            raise MalformedMarkupError
        reader.take(1)
        calls.arguments(("{" if not keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        keys.add(key)
        yield from copy_literal(reader, calls.arguments)
    calls.arguments("}" if keys else "{}")
    calls.end()


def _call_rule(lark: LarkText, tool: ToolSpec) -> str:
    objects = [
        _arguments_rule(lark, schema, tool.parameters) for schema in object_schemas(tool.parameters, tool.parameters)
    ]
    arguments = lark.rule("arguments", " | ".join(objects))
    return f"{lark.literal(tool.name + '(')} {arguments} {lark.literal(')')}"


def _arguments_rule(lark: LarkText, schema: ObjectSchema, root: Mapping[str, Any]) -> str:
    """Return a grammar's expression for the arguments in the schema's order; those that are not required may be missing."""
    schema = schema.with_names(_ARGUMENT_NAME)
    start = '""'  # expression for the arguments from here on if none has been written before
    after = '""'  # the same if one has been written, so that a comma comes first
    for name, value in reversed(list(schema.properties.items())):
        written = lark.rule("argument", f"{lark.literal(name + '=')} {_value(lark, value, root)}")
        next_written = f"{lark.literal(', ')} {written}"
        if name in schema.required:
            start, after = f"{written} {after}", f"{next_written} {after}"
        else:
            start, after = f"{written} {after} | {start}", f"({next_written})? {after}"
        start, after = lark.rule("arguments", start), lark.rule("more_arguments", after)
    # Only one additional argument, because a grammar cannot say that two names differ.
    if not schema.properties and schema.additional is not False:
        start = f"(/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {lark.literal('=')} {_value(lark, schema.additional, root)})?"
    return start


def _value(lark: LarkText, schema: Any, root: Mapping[str, Any]) -> str:
    return lark.json(with_definitions(schema, root) if isinstance(schema, Mapping) else schema, escapes=_ESCAPES)
