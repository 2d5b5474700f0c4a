"""`hermes`, of Hermes 2 and 3, Qwen 2.5 and Qwen 3: each call is a JSON object between `<tool_call>` and `</tool_call>`.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A block may hold several objects. Inside the JSON's strings, `</tool_call>` is text.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.text.markup.call_object import object_rule, read_call_object
from transom_core.text.markup.call_reading import CallReading
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import Reading
from transom_core.text.markup.tool_markup import ToolMarkup

_END = "</tool_call>"


class HermesTools(ToolMarkup):
    """Tool calls of the hermes family."""

    openers = ("<tool_call>",)
    markers = (_END,)
    separator = "\n"
    ends_reasoning = True

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the objects of one block."""
        reader = calls.reader
        yield from reader.skip_space()
        while True:
            yield from read_call_object(calls)
            yield from reader.skip_space()
            if (yield from reader.skip(_END)) or (yield from reader.peek()) != "{":
                return

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one object on a line of its own, and the marker after it."""
        line_end = lark.literal("\n")
        return f"{line_end} {object_rule(lark, tools, arguments_key='arguments')} {line_end} {lark.marker(_END)}"
