"""Reads a tool call that is one JSON object: `{"name": "get_weather", "arguments": {"city": "Paris"}}`, keys in any order.

After the name, arguments are passed on as they come; arguments that come before the name are held until the name is complete. Other
keys (`type`, `id`, `tool_call_id`) are read and dropped. Missing or null arguments become `{}`. If the arguments are a string that
contains a JSON object, as some models write them, they become that object.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.json_reader import copy_value, read_string
from transom_core.text.markup.lark import LarkText, arguments_schema
from transom_core.text.markup.parameters import is_json
from transom_core.text.markup.reader import MalformedMarkupError, MarkupReader, Reading
from transom_core.text.markup.tool_markup import CallReading

ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")  # keys that a call may have before its name


class CallKeys(NamedTuple):
    """The keys of a call object. A grammar demands them; `number` is the first one, of the call's number; "" for none."""

    name: str = "name"
    arguments: str = "arguments"
    number: str = ""


USUAL_KEYS = CallKeys()


def read_call_object(calls: CallReading, keys: CallKeys = USUAL_KEYS, *, is_marked: bool = True) -> Reading[None]:
    """Read one call.

    Without a marker before it (`is_marked` False), an object is a call only if it has arguments and the name of one of the
    request's tools. Such an object counts as ordinary text from the first key that a call cannot have before its name, so that the
    text of a JSON answer is not held back for long.

    Raises:
        MalformedMarkupError: the text is not a JSON object, or has no name.
    """
    call = _CallObject(calls, keys.name, is_marked=is_marked)
    reader = calls.reader
    yield from reader.expect("{")
    yield from reader.skip_space()
    while not (yield from reader.skip("}")):
        yield from call.read_member()
        yield from reader.skip_space()
        if (yield from reader.peek()) != "}":
            yield from reader.expect(",")
            yield from reader.skip_space()
            if (yield from reader.peek()) == "}":  # JSON has no trailing comma
                raise MalformedMarkupError
    call.end()


def object_rule(lark: LarkText, tools: Sequence[ToolSpec], keys: CallKeys = USUAL_KEYS) -> str:
    """Return a grammar's expression for one call object, which calls one of `tools`."""
    begin = lark.literal("{")
    if keys.number:
        key, quoted = lark.literal(json.dumps(keys.number) + ': "'), lark.terminal("number", "/[0-9]{1,4}/")
        begin = " ".join([begin, key, quoted, lark.literal('", ')])
    return f"{begin} ({' | '.join(_members(lark, tool, keys) for tool in tools)}) {lark.literal('}')}"


def _members(lark: LarkText, tool: ToolSpec, keys: CallKeys) -> str:
    begin = f'"{keys.name}": {json.dumps(tool.name)}, "{keys.arguments}": '
    return f"{lark.literal(begin)} {lark.json(arguments_schema(tool))}"


def read_call_array(calls: CallReading, keys: CallKeys = USUAL_KEYS) -> Reading[None]:
    """Read calls in a JSON array, `[{"name": ...}, {"name": ...}]`."""
    yield from calls.read_list(lambda: read_call_object(calls, keys))


def array_rule(lark: LarkText, tools: Sequence[ToolSpec], keys: CallKeys = USUAL_KEYS, *, parallel: bool) -> str:
    """Return a grammar's expression for an array of call objects: one call, or several if `parallel`."""
    call = lark.rule("call", object_rule(lark, tools, keys))
    return lark.list_of(call, has_several=parallel)


def read_json_arguments(calls: CallReading) -> Reading[None]:
    """Read one JSON object, with space around it, as the arguments of the open call.

    Raises:
        MalformedMarkupError: the text is not a JSON object.
    """
    yield from calls.reader.skip_space()
    if (yield from calls.reader.peek()) != "{":
        raise MalformedMarkupError
    yield from copy_value(calls.reader, calls.arguments)
    yield from calls.reader.skip_space()


class _CallObject:
    """The state of reading one call object."""

    def __init__(self, calls: CallReading, name_key: str, *, is_marked: bool) -> None:
        self._calls, self._name_key = calls, name_key
        self._is_marked = is_marked
        self._name: str | None = None
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._has_begun = False  # the name was passed on

    def read_member(self) -> Reading[None]:
        """Read a key and its value."""
        reader = self._calls.reader
        key = yield from read_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == self._name_key and self._name is None:
            self._name = yield from self._read_name()
            if self._is_marked or self._has_arguments:
                self._begin()
        elif key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if self._name is not None and not self._has_begun:
                self._begin()
            yield from self._read_arguments()
        elif self._is_marked or self._has_begun or key in _OTHER_KEYS:
            yield from copy_value(reader, _leave_out)
        else:
            raise MalformedMarkupError

    def end(self) -> None:
        """Note that the object is closed: end the call."""
        if not self._has_begun:
            raise MalformedMarkupError
        if not self._has_arguments:
            self._calls.arguments("{}")
        self._calls.end()

    def _read_name(self) -> Reading[str]:
        if (yield from self._calls.reader.peek()) != '"':
            raise MalformedMarkupError
        name = yield from read_string(self._calls.reader)
        if not name or (not self._is_marked and name not in self._calls.tools):
            raise MalformedMarkupError
        return name

    def _begin(self) -> None:
        assert self._name is not None
        self._has_begun = True
        self._calls.begin(self._name)
        for piece in self._held:
            self._calls.arguments(piece)
        self._held = []

    def _read_arguments(self) -> Reading[None]:
        reader = self._calls.reader
        write = self._calls.arguments if self._has_begun else self._held.append
        first = yield from reader.peek()
        if first == "{":
            yield from copy_value(reader, write)
        elif first == '"':
            text = yield from read_string(reader)
            write(_object_in(text))
        else:
            yield from _read_null(reader)
            write("{}")


def _object_in(text: str) -> str:
    if not is_json(text or "{}", frozenset({"object"})):
        raise MalformedMarkupError
    return text or "{}"


def _read_null(reader: MarkupReader) -> Reading[None]:
    pieces: list[str] = []
    yield from copy_value(reader, pieces.append)
    if "".join(pieces) != "null":
        raise MalformedMarkupError


def _leave_out(text: str) -> None:
    """Drop the value of a key that is neither the call's name nor its arguments."""
