"""The parsers `deepseek_v3` and `deepseek_v31`: an answer's calls are in one section, each call between special tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

DeepSeek V3.1 leaves out the type (`function`) and the code fence:

    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>

Inside the JSON's strings, markers are ordinary text.
"""

from collections.abc import Sequence
from typing import ClassVar

from transom_core.text.markup.call_object import read_json_arguments
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText, arguments_schema
from transom_core.text.markup.reader import SPACE, MalformedMarkupError, Markers, Reading
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_TYPE = "function"
_NAME_ENDS = Markers([_SEPARATOR, "\n", _CALL, _CALL_END, _SECTION_END])


class DeepSeekV31Tools(ToolMarkup):
    """Tool calls of DeepSeek V3.1."""

    openers = (_SECTION,)
    markers = (_SECTION_END, _CALL, _CALL_END, _SEPARATOR)
    before_name: ClassVar[str] = ""
    before_arguments: ClassVar[str] = _SEPARATOR
    after_arguments: ClassVar[str] = ""

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the calls of one section."""
        reader = calls.reader
        yield from reader.skip_space()
        while not (yield from reader.skip(_SECTION_END)):
            yield from reader.expect(_CALL)
            yield from self._read_call(calls)
            yield from reader.expect(_CALL_END)
            calls.end()
            yield from reader.skip_space()

    def _read_call(self, calls: CallReading) -> Reading[None]:
        reader = calls.reader
        yield from reader.expect(self.before_name)
        text, end = yield from reader.text_until(_NAME_ENDS)
        name = text.strip(SPACE)
        # What ends the name must be the beginning of `before_arguments`: V3.1's separator, or the line end before V3's code fence.
        if not name or end != self.before_arguments[: len(end)]:
            raise MalformedMarkupError
        calls.begin(name)
        yield from reader.expect(self.before_arguments[len(end) :])
        yield from read_json_arguments(calls)
        if self.after_arguments:
            yield from reader.skip(self.after_arguments)

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the calls and the marker at the section's end."""
        each = lark.rule("section_call", " | ".join(self._call(lark, tool) for tool in tools))
        return f"{each}{'+' if parallel else ''} {lark.marker(_SECTION_END)}"

    def _call(self, lark: LarkText, tool: ToolSpec) -> str:
        before = f"{lark.marker(_CALL)} {lark.literal(tool.name)} {lark.marker(_SEPARATOR)}"
        return f"{before} {lark.json(arguments_schema(tool))} {lark.marker(_CALL_END)}"


class DeepSeekV3Tools(DeepSeekV31Tools):
    """Tool calls of DeepSeek V3 and R1."""

    before_name = _TYPE + _SEPARATOR
    before_arguments = "\n```json\n"
    after_arguments = "```"

    def _call(self, lark: LarkText, tool: ToolSpec) -> str:
        before = f"{lark.marker(_CALL)} {lark.literal(_TYPE)} {lark.marker(_SEPARATOR)}"
        begin, end = lark.literal(f"{tool.name}\n```json\n"), lark.literal("\n```")
        return f"{before} {begin} {lark.json(arguments_schema(tool))} {end} {lark.marker(_CALL_END)}"
