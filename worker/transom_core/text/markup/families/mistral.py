"""The parser `mistral`: calls after `[TOOL_CALLS]`, in one of two forms. The text after the marker tells the form.

Since tokenizer v11 (Mistral Small 3.2, Magistral, Devstral, Ministral 3), each call has a marker; its id is optional and dropped:

    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]123456789[ARGS]{}

Older tokenizers (Mistral 7B v0.3, Nemo, Small 3.1) have one marker and a JSON array, after a space or none:

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]
"""

import re
from collections.abc import Sequence

from transom_core.text.markup.call_object import array_rule, read_call_array, read_call_object
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.json_reader import copy_value
from transom_core.text.markup.lark import LarkText, arguments_schema
from transom_core.text.markup.reader import MalformedMarkupError, MarkupReader, Reading
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_ARGUMENTS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_WORD = re.compile(r"[^\s\[{]*")


class MistralTools(ToolMarkup):
    """Tool calls of Mistral's models."""

    openers = ("[TOOL_CALLS]",)
    markers = (_ARGUMENTS, _CALL_ID)
    separator = ""

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read an array of calls, or one call."""
        yield from calls.reader.skip_space()
        following = yield from calls.reader.peek()
        if following == "[":
            yield from read_call_array(calls)
        elif following == "{":
            yield from read_call_object(calls)
        else:
            yield from _read_named(calls)

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one call in the form since v11."""
        marker = lark.marker(_ARGUMENTS)
        choices = [f"{lark.literal(tool.name)} {marker} {lark.json(arguments_schema(tool))}" for tool in tools]
        return f"({' | '.join(choices)})"

    def calls(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for calls in the form of the model's tokenizer: since v11 it has the token `[ARGS]`."""
        if lark.has_marker(_ARGUMENTS):
            return super().calls(lark, tools, parallel=parallel)
        return _ArrayCalls().calls(lark, tools, parallel=parallel)

    def calls_after_text(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for text and calls in the form of the model's tokenizer."""
        if lark.has_marker(_ARGUMENTS):
            return super().calls_after_text(lark, tools, parallel=parallel)
        return _ArrayCalls().calls_after_text(lark, tools, parallel=parallel)


class _ArrayCalls(ToolMarkup):
    """The form of tokenizers before v11."""

    openers = MistralTools.openers

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        yield from read_call_array(calls)

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        return f"{lark.literal(' ')}? {array_rule(lark, tools, parallel=parallel)}"


def _read_named(calls: CallReading) -> Reading[None]:
    """Read one call in the form since v11. `[ARGS]` may be missing if the call has no id."""
    reader = calls.reader
    name = yield from _read_word(reader)
    if (yield from reader.skip(_CALL_ID)):
        yield from _read_word(reader)
        yield from reader.expect(_ARGUMENTS)
    elif (yield from reader.peek()) != "{":
        yield from reader.expect(_ARGUMENTS)
    calls.begin(name)
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise MalformedMarkupError
    yield from copy_value(reader, calls.arguments)
    calls.end()


def _read_word(reader: MarkupReader) -> Reading[str]:
    """Read a name or an id, up to space, a bracket or a brace."""
    word = yield from reader.run(_WORD)
    if not word:
        raise MalformedMarkupError
    return word
