"""The parsers `hermes`, `granite`, `nemotron_json`, `jamba`, `cohere_command3` and `llama3_json`: calls are JSON objects, and the
text around them differs.

`hermes`, of Hermes 2 and 3, Qwen 2.5 and Qwen 3: each call is between `<tool_call>` and `</tool_call>`. A block may hold several
objects. Inside the JSON's strings, `</tool_call>` is text.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

`granite`, of Granite 3: an array of calls after `<|tool_call|>`, or after `<tool_call>` in some versions. (Granite 4's calls are in
the `hermes` format.)

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

`nemotron_json`, of Nemotron Nano 2: the same array between `<TOOLCALL>` and `</TOOLCALL>`; `jamba`: between `<tool_calls>` and
`</tool_calls>`.

`cohere_command3`, of Command R7B and Command A: an array with other keys. `<|START_RESPONSE|>` and `<|END_RESPONSE|>` are around a
message (`reasoning.COHERE`).

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>

`llama3_json`, of Llama 3.1 to 3.3: an answer that is an object with a tool's name and "parameters" is a call. Several calls are
separated by `;`. `<|python_tag|>` may come before the calls, and then text may come before it. Without that marker, other JSON is
the message, such as an object without a tool's name. "arguments" is read like "parameters".

    {"name": "get_weather", "parameters": {"city": "Paris"}}
"""

from collections.abc import Sequence

from transom_core.text.markup.call_object import (
    USUAL_KEYS,
    CallKeys,
    array_rule,
    object_rule,
    read_call_array,
    read_call_object,
)
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import Reading
from transom_core.text.markup.tool_markup import BareToolMarkup, CallReading, ToolMarkup

_HERMES_END = "</tool_call>"
_LLAMA_SEPARATORS = ";,"


class HermesTools(ToolMarkup):
    """Tool calls of the hermes family."""

    openers = ("<tool_call>",)
    markers = (_HERMES_END,)
    separator = "\n"
    ends_reasoning = True

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the objects of one block."""
        reader = calls.reader
        yield from reader.skip_space()
        while True:
            yield from read_call_object(calls)
            yield from reader.skip_space()
            if (yield from reader.skip(_HERMES_END)) or (yield from reader.peek()) != "{":
                return

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one object on a line of its own, and the marker after it."""
        line_end = lark.literal("\n")
        return f"{line_end} {object_rule(lark, tools)} {line_end} {lark.marker(_HERMES_END)}"


class JsonArrayTools(ToolMarkup):
    """Tool calls in one array, after one of `openers`; `end` is the marker after it, or ""."""

    def __init__(self, *openers: str, end: str = "", keys: CallKeys = USUAL_KEYS) -> None:
        self.openers, self._keys = openers, keys
        self.markers = (end,) if end else ()

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one array, or one object, and the marker after it."""
        yield from calls.reader.skip_space()
        yield from (read_call_object if (yield from calls.reader.peek()) == "{" else read_call_array)(calls, self._keys)
        yield from calls.skip_markers(self.markers)

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one array of calls, and the marker after it."""
        return " ".join([array_rule(lark, tools, self._keys, parallel=parallel), *map(lark.marker, self.markers)])


class Llama3JsonTools(BareToolMarkup):
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
            if following in _LLAMA_SEPARATORS:
                reader.take(1)
                yield from reader.skip_space()
            elif following != "{":
                return

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one object, or several if `parallel`."""
        call = lark.rule("call", object_rule(lark, tools, CallKeys(arguments="parameters")))
        return f"{call} ({lark.literal('; ')} {call})*" if parallel else call
