"""`granite`, of Granite 3: a JSON array of calls after `<|tool_call|>`, or after `<tool_call>` in some versions.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Granite 4 writes calls in the `hermes` format.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.text.markup.call_object import array_rule, read_call_array
from transom_core.text.markup.call_reading import CallReading
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import Reading
from transom_core.text.markup.tool_markup import ToolMarkup


class GraniteTools(ToolMarkup):
    """Tool calls of Granite 3."""

    openers = ("<|tool_call|>", "<tool_call>")

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one array."""
        yield from calls.reader.skip_space()
        yield from read_call_array(calls)

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one array of calls."""
        return array_rule(lark, tools, parallel=parallel)
