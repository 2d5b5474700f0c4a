"""The parser `qwen3_coder` (or `qwen3_xml`), for Qwen3-Coder and Qwen 3.5 on: calls are XML-like tags, arguments plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

One line end after `<parameter=city>` and one before `</parameter>` are markup. The text between them is the argument; the tool's
schema gives its type.

An argument's text may itself contain these tags. So `</parameter>` ends the argument only if `<parameter=`, `</function>` or
`</tool_call>` follows. Models forget tags. An argument without its end tag ends at a line that begins with `</function>` followed
by `</tool_call>`, or with `<parameter=` and the name of one of the tool's other arguments. `<tool_call>` may be missing before
`<function=...>` with a tool's name.

`seed_oss`, of Seed-OSS: the block is `<seed:tool_call>`, and no line ends are around an argument's text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transom_core.text.markup.call_object import read_call_object
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText, escaped
from transom_core.text.markup.parameter_grammar import ParameterMarkup, parameter_rules
from transom_core.text.markup.parameters import ParameterWriter
from transom_core.text.markup.reader import SPACE, MalformedMarkupError, Markers, Reading, Write
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
_SPACES = re.compile(f"[{SPACE}]*")


class Qwen3CoderTools(ToolMarkup):
    """Tool calls of Qwen3-Coder and its successors."""

    separator = "\n"
    ends_reasoning = True

    def __init__(self, block: str = "tool_call", line_end: str = "\n") -> None:
        """`block` is the name of a block's tag, and `line_end` what is between an argument's tags and its text."""
        self._call_end, self._line_end = f"</{block}>", line_end
        self.openers = (f"<{block}>", _FUNCTION)
        self.markers = (self._call_end,)

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the functions of one block."""
        reader = calls.reader
        if opener == _FUNCTION:
            yield from self._read_function(calls, needs_tool=True)
        else:
            yield from reader.skip_space()
            if (yield from reader.peek()) == "{":  # some of these models fall back to their predecessors' `hermes` form
                yield from read_call_object(calls)
            else:
                yield from reader.expect(_FUNCTION)
                yield from self._read_function(calls)
        yield from reader.skip_space()
        while not (yield from reader.skip(self._call_end)) and (yield from reader.skip(_FUNCTION)):
            yield from self._read_function(calls)
            yield from reader.skip_space()

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for one function in its block."""
        functions = lark.rule("function", " | ".join(self._function_rule(lark, tool) for tool in tools))
        end = f"{lark.literal(_FUNCTION_END + chr(10))} {lark.marker(self._call_end)}"
        return f"{lark.literal(chr(10) + _FUNCTION)} {functions} {end}"

    def _read_function(self, calls: CallReading, *, needs_tool: bool = False) -> Reading[None]:
        return _Function(calls, self._call_end, self._line_end).read(needs_tool=needs_tool)

    def _function_rule(self, lark: LarkText, tool: ToolSpec) -> str:
        markup = ParameterMarkup(
            before_name=lark.literal(_PARAMETER),
            before_value=lambda json_type: lark.literal(">" + self._line_end),
            end=self._line_end + _PARAMETER_END,
            after=lark.literal("\n"),
            other_ends=_other_ends(tool, self._call_end),
        )
        return f"{lark.literal(tool.name + '>' + chr(10))} {parameter_rules(lark, tool.parameters, markup)}"


def _other_ends(tool: ToolSpec, call_end: str) -> str:
    """Return a regular expression for the texts, besides the usual end, that `_Function` takes for the end of an argument."""
    spaces = f"[{escaped(SPACE)}]*"
    ends = [
        f"{escaped(_PARAMETER_END)}{spaces}({'|'.join(map(escaped, (_PARAMETER, _FUNCTION_END, call_end)))})",
        f"{escaped(chr(10) + _FUNCTION_END)}{spaces}{escaped(call_end)}",
        *(escaped(f"\n{_PARAMETER}{name}>") for name in _argument_names(tool)),
    ]
    return "|".join(ends)


def _argument_names(tool: ToolSpec) -> Mapping[str, Any]:
    """Return the arguments that a tool's schema names; none if the schema, which nothing has to hold, is wrong."""
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


class _Function:
    """Reads one call, after `<function=`."""

    def __init__(self, calls: CallReading, call_end: str, line_end: str) -> None:
        self._calls = calls
        self._reader = calls.reader
        self._call_end, self._line_end = call_end, line_end
        self._ends = Markers((_PARAMETER_END, line_end + _PARAMETER_END, "\n" + _FUNCTION_END, "\n" + _PARAMETER))
        self._next_names: set[str] = set()  # names of the tool's arguments that have not come yet
        self._has_ended = False
        self._next_name: str | None = None  # name of an argument that began before the end tag of the previous one

    def read(self, *, needs_tool: bool) -> Reading[None]:
        """Read the name, the arguments and `</function>`. With `needs_tool`, the name must be that of a tool."""
        name = (yield from self._reader.run(_NAME)).strip(SPACE)
        if not name or (needs_tool and name not in self._calls.tools):
            raise MalformedMarkupError
        yield from self._reader.expect(">")
        self._calls.begin(name)
        tool = self._calls.tools.get(name)
        self._next_names = set(_argument_names(tool)) if tool else set()
        arguments = ParameterWriter(self._calls, name)
        while (argument := (yield from self._begin_argument())) is not None:
            arguments.begin(argument)
            self._next_names.discard(argument)
            if self._line_end:
                yield from self._reader.skip(self._line_end)
            yield from arguments.read_value(argument, self._read_text)
        arguments.end()
        self._calls.end()

    def _begin_argument(self) -> Reading[str | None]:
        """Read the tag that begins the next argument, and return its name; None at the function's end."""
        if self._has_ended:
            return None
        name, self._next_name = self._next_name, None
        if name is not None:
            return name
        yield from self._reader.skip_space()
        if (yield from self._reader.skip(_FUNCTION_END)) or (yield from self._reader.next_is(self._call_end)):
            return None
        yield from self._reader.expect(_PARAMETER)
        name = yield from self._reader.run(_NAME)
        yield from self._reader.expect(">")
        return name

    def _read_text(self, write: Write) -> Reading[None]:
        """Read an argument's text and its end."""
        while True:
            marker = yield from self._reader.until(self._ends, write)
            if marker.endswith(_PARAMETER_END):
                read, is_end = yield from self._ends_before((_PARAMETER, _FUNCTION_END, self._call_end))
            elif marker.endswith(_FUNCTION_END):
                read, is_end = yield from self._ends_before((self._call_end,))
                self._has_ended = is_end
            else:
                read, is_end = yield from self._ends_at_next()
            if is_end:
                return
            write(marker + read)

    def _ends_before(self, tags: Sequence[str]) -> Reading[tuple[str, bool]]:
        """Read space. Return ("", True) if one of `tags` follows, and else (the space, False)."""
        spaces = yield from self._reader.run(_SPACES)
        for tag in tags:
            if (yield from self._reader.next_is(tag)):
                return "", True
        return spaces, False

    def _ends_at_next(self) -> Reading[tuple[str, bool]]:
        """Read the name after `<parameter=`. Return ("", True) if another argument begins there, else (the name, False)."""
        name = yield from self._reader.run(_NAME)
        if name in self._next_names and (yield from self._reader.skip(">")):
            self._next_name = name
            return "", True
        return name, False
