"""`llama3_json`, of Llama 3.1 to 3.3: an answer that is a JSON object with a tool's name and "parameters" is a call.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Several calls are separated by `;`. `<|python_tag|>` may come before the calls, and then text may come before it. Without that
marker, other JSON is the message, such as an object without a tool's name. "arguments" is read like "parameters".
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.text.markup.call_object import object_rule, read_call_object
from transom_core.text.markup.call_reading import CallReading
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import Reading
from transom_core.text.markup.tool_markup import ToolMarkup

_SEPARATORS = ";,"


class Llama3JsonTools(ToolMarkup):
    """Tool calls of Llama 3."""

    openers = ("<|python_tag|>",)
    starters = "{"

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read objects up to the first text that is not an object."""
        reader = calls.reader
        yield from reader.skip_space()
        while True:
            yield from read_call_object(calls, is_marked=bool(opener))
            yield from reader.skip_space()
            following = yield from reader.peek()
            if following in _SEPARATORS:
                reader.take(1)
                yield from reader.skip_space()
            elif following != "{":
                return

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one object, or several if `parallel`."""
        call = lark.rule("call", object_rule(lark, tools, arguments_key="parameters"))
        return f"{call} ({lark.literal('; ')} {call})*" if parallel else call

    def calls(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the objects, without a marker."""
        return self.body(lark, tools, parallel=parallel)

    def calls_after_text(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for objects, with or without a marker, or for text that does not begin like an object or contain a
        marker.
        """
        body = lark.rule("calls", self.body(lark, tools, parallel=parallel))
        text = lark.text_without(self.openers, begins=r"[^{ \t\r\n]")
        return f"{lark.marker(self.openers[0])}? {body} | {text}?"
