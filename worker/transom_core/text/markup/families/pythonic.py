"""The parsers `pythonic`, `llama4_pythonic`, `lfm2` and `olmo3`: calls are written as Python calls with named arguments.

    [get_weather(city='San Francisco', metric='celsius'), get_time()]

Without a marker, a list is calls if it begins the message and its first name is a tool's; other lists are the message. Llama 4 may
write `<|python_start|>` before the list and `<|python_end|>` after it; with this marker the list may come after text.

LFM2's list is always between `<|tool_call_start|>` and `<|tool_call_end|>`. Olmo 3 has no list: calls are lines between
`<function_calls>` and `</function_calls>`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.object_schemas import ObjectSchema, object_schemas, with_definitions
from transom_core.text.markup.python_literals import copy_literal
from transom_core.text.markup.reader import AnswerEnded, MalformedMarkupError, Markers, Reading
from transom_core.text.markup.tool_markup import BareToolMarkup, CallReading, ToolMarkup

_NAME = re.compile(r"[\w.-]*")
_ARGUMENT_NAME = re.compile(r"[\w.-]+")
_ESCAPES = 'nrtbf"\\u'  # characters after a backslash that mean the same in JSON and in Python


class PythonicTools(BareToolMarkup):
    """Tool calls written as Python."""

    starters = "["

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one list of calls."""
        yield from _read_list(calls, self.markers, is_marked=bool(opener))

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the whole list."""
        return lark.list_of(_calls_rule(lark, tools), has_several=parallel)


class Llama4Tools(PythonicTools):
    """Tool calls of Llama 4."""

    openers = ("<|python_start|>",)
    markers = ("<|python_end|>",)


class Lfm2Tools(ToolMarkup):
    """Tool calls of LFM2."""

    openers = ("<|tool_call_start|>",)
    markers = ("<|tool_call_end|>",)

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one list of calls, the marker after it, and its echo: these models may write the list and the marker twice."""
        yield from _read_list(calls, self.markers, is_marked=True)
        echo: list[str] = []
        try:
            if (yield from calls.reader.next_is("[")):
                yield from calls.reader.until(Markers(self.markers), echo.append)
        except AnswerEnded:
            calls.show("".join(echo))  # it is a list in the message
            raise
        calls.leave_out("".join(echo))

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the list, and the marker after it."""
        return f"{lark.list_of(_calls_rule(lark, tools), has_several=parallel)} {lark.marker(self.markers[0])}"


class Olmo3Tools(ToolMarkup):
    """Tool calls of Olmo 3."""

    openers = ("<function_calls>",)
    markers = ("</function_calls>",)

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the calls of one block, each on a line of its own."""
        yield from calls.reader.skip_space()
        while not (yield from calls.reader.skip(self.markers[0])):
            yield from _read_call(calls, is_marked=True)
            yield from calls.reader.skip_space()

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the lines of one block, and the marker after it."""
        line_end = lark.literal("\n")
        return f"{line_end} ({_calls_rule(lark, tools)} {line_end}){'+' if parallel else ''} {lark.marker(self.markers[0])}"


def _read_list(calls: CallReading, ends: Sequence[str], *, is_marked: bool) -> Reading[None]:
    yield from calls.reader.skip_space()
    yield from calls.read_list(lambda: _read_call(calls, is_marked=is_marked))
    yield from calls.skip_markers(ends)


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


def _calls_rule(lark: LarkText, tools: Sequence[ToolSpec]) -> str:
    """Return the name of a rule for one call of one of `tools`."""
    return lark.rule("call", " | ".join(_call_rule(lark, tool) for tool in tools))


def _call_rule(lark: LarkText, tool: ToolSpec) -> str:
    objects = [
        _arguments_rule(lark, schema, tool.parameters)
        for schema in object_schemas(lark, tool.parameters, tool.parameters)
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
    if not schema.properties and schema.additional is not False:
        value = _value(lark, schema.additional, root)
        written = lark.rule("argument", f"{lark.argument_name()} {lark.literal('=')} {value}")
        start = f"({written} ({lark.literal(', ')} {written})*)?"
    return start


def _value(lark: LarkText, schema: Any, root: Mapping[str, Any]) -> str:
    return lark.json(with_definitions(schema, root) if isinstance(schema, Mapping) else schema, escapes=_ESCAPES)
