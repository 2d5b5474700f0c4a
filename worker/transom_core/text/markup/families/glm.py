"""The parsers `glm45` and `glm47`, for GLM 4.5 to 5: a call is a name followed by the arguments as keys and values.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

GLM 4.7 and 5 leave out the line ends. A value is a raw string or JSON; the tool's schema tells which. A value goes up to
`</arg_value>`, and other markers inside it are text. If `</arg_value>` is missing, a `</tool_call>` at the very end of the answer
ends the value.
"""

from collections.abc import Sequence

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.parameter_grammar import ParameterMarkup, parameter_rules
from transom_core.text.markup.parameters import ParameterWriter
from transom_core.text.markup.reader import SPACE, AnswerEnded, MalformedMarkupError, Markers, Reading, Write
from transom_core.text.markup.tool_markup import CallReading, ToolMarkup

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_ENDS = Markers([_KEY, _CALL_END, _CALL])
_KEY_ENDS = Markers([_KEY_END])
_VALUE_ENDS = Markers([_VALUE_END, _CALL_END])


class GlmTools(ToolMarkup):
    """Tool calls of GLM."""

    openers = (_CALL,)
    markers = (_CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    ends_reasoning = True

    def __init__(self, between: str) -> None:
        """`between` is the space between markers in a grammar."""
        self.separator = self._between = between

    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read one call."""
        reader = calls.reader
        text, marker = yield from reader.text_until(_NAME_ENDS)
        name = text.strip(SPACE)
        if not name or marker == _CALL or any(space in name for space in SPACE):
            raise MalformedMarkupError
        calls.begin(name)
        parameters = ParameterWriter(calls, name)
        while marker != _CALL_END:
            marker = yield from self._read_argument(calls, parameters)
        parameters.end()
        calls.end()

    def _read_argument(self, calls: CallReading, parameters: ParameterWriter) -> Reading[str]:
        """Read the rest of a key, and its value. Return the marker after them."""
        reader = calls.reader
        key, _ = yield from reader.text_until(_KEY_ENDS)
        name = key.strip(SPACE)
        yield from reader.skip_space()
        yield from reader.expect(_VALUE)
        parameters.begin(name)
        value = _Value(calls, parameters)
        yield from parameters.read_value(name, value.read)
        if value.ends_answer:
            return _CALL_END
        yield from reader.skip_space()
        if (yield from reader.skip(_CALL_END)):
            return _CALL_END
        yield from reader.expect(_KEY)
        return _KEY

    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for a name and its arguments."""
        space = lark.literal(self._between) if self._between else ""
        markup = ParameterMarkup(
            before_name=lark.marker(_KEY),
            before_value=lambda kind: f"{lark.marker(_KEY_END)} {space} {lark.marker(_VALUE)}",
            end=_VALUE_END,
            after=space,
        )
        calls = [
            f"{lark.literal(tool.name + self._between)} {parameter_rules(lark, tool.parameters, markup)}"
            for tool in tools
        ]
        return f"({' | '.join(calls)}) {lark.marker(_CALL_END)}"


class _Value:
    """Reads one value up to its end marker."""

    def __init__(self, calls: CallReading, parameters: ParameterWriter) -> None:
        self._reader = calls.reader
        self.ends_answer = False  # the value had no end marker, and the call's end marker ended the answer

    def read(self, write: Write) -> Reading[None]:
        """Read the value's text and its end marker, and write the text."""
        while (yield from self._reader.until(_VALUE_ENDS, write)) == _CALL_END:
            # If only space follows, up to the answer's end, this marker ends the value; otherwise it is a part of the value's text.
            held = [_CALL_END]
            try:
                while (following := (yield from self._reader.peek())) in SPACE:
                    held.append(self._reader.take(1))
            except AnswerEnded:
                self.ends_answer = True
                return
            assert following
            write("".join(held))
