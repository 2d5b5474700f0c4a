"""The parser `kimi_k2`: an answer's calls are in one section, each between special tokens, with the tool's name in the call's id.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

(without the line end). The number after the name counts a chat's calls. Inside the JSON's strings, markers are ordinary text.
"""

import re
from collections.abc import Sequence

from transom_core.text.markup.call_object import read_json_arguments
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText, arguments_schema
from transom_core.text.markup.reader import MalformedMarkupError, Markers, Reading
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?\s*")
_ID_ENDS = Markers([_ARGUMENTS, _CALL, _CALL_END, _SECTION_END])
_CALL_OR_END = Markers([_CALL, _SECTION_END])


class KimiK2Tools(ToolMarkup):
    """Tool calls of Kimi K2."""

    openers = (_SECTION, "<|tool_call_section_begin|>")  # the second is a misspelling that the models make
    markers = (_SECTION_END, _CALL, _ARGUMENTS, _CALL_END)
    ends_reasoning = True
    keeps_space = True

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the calls of one section. Text between calls belongs neither to a call nor to the message, and is not shown."""
        reader = calls.reader
        while (yield from _read_to_call(calls)) == _CALL:
            text, end = yield from reader.text_until(_ID_ENDS)
            call_id = _ID.fullmatch(text)
            if end != _ARGUMENTS or call_id is None:
                raise MalformedMarkupError
            calls.begin(call_id["name"])
            yield from read_json_arguments(calls)
            yield from reader.expect(_CALL_END)
            calls.end()

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the calls and the marker at the section's end."""
        each = lark.rule("section_call", " | ".join(_call(lark, tool) for tool in tools))
        return f"{each}{'+' if parallel else ''} {lark.marker(_SECTION_END)}"


def _call(lark: LarkText, tool: ToolSpec) -> str:
    begin = f"{lark.marker(_CALL)} {lark.literal(f'functions.{tool.name}:')} {lark.terminal('number', '/[0-9]{1,4}/')}"
    return f"{begin} {lark.marker(_ARGUMENTS)} {lark.json(arguments_schema(tool))} {lark.marker(_CALL_END)}"


def _read_to_call(calls: CallReading) -> Reading[str]:
    """Read up to the next call or the section's end, and return the marker there."""
    pieces: list[str] = []
    try:
        return (yield from calls.reader.until(_CALL_OR_END, pieces.append))
    finally:
        calls.leave_out("".join(pieces))
