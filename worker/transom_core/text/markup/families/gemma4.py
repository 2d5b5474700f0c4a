"""`gemma4`: a call's arguments are an object in the model's own notation, with unquoted keys and strings between `<|"|>`.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],at:{home:true}}<tool_call|>

Strings are raw: nothing is escaped in them. They go up to the next `<|"|>`, and other markers inside them are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transom_core.text.markup.call_reading import CallReading
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.families.gemma4_grammar import QUOTE, object_expression
from transom_core.text.markup.json_reader import copy_string, read_string
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.parameters import quoted, typed_value
from transom_core.text.markup.reader import SPACE, MalformedMarkupError, Markers, MarkupReader, Reading
from transom_core.text.markup.schema_types import JSON_TYPES
from transom_core.text.markup.tool_markup import ToolMarkup

_CALL, _CALL_END = "<|tool_call>", "<tool_call|>"
_NAME_ENDS = Markers(["{", _CALL_END, _CALL])
_STRING_ENDS = Markers([QUOTE])
_BARE = re.compile(r"[^,:{}\[\]]+")
_BARE_KEY = re.compile(r"[^:{}]+")


class Gemma4Tools(ToolMarkup):
    """Tool calls of Gemma 4."""

    openers = (_CALL,)
    markers = (_CALL_END, QUOTE)
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
        calls = [f"{lark.literal('call:' + tool.name)} {object_expression(lark, tool.parameters)}" for tool in tools]
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
    if (yield from reader.skip(QUOTE)):
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
    if (yield from reader.skip(QUOTE)):
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
