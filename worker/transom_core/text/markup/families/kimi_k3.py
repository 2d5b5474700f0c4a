"""The parser `kimi_k3`: XTML, XML-like elements whose tags are between special tokens; each argument has its type.

    Rain?<|close|>think<|sep|><|open|>response<|sep|>Let me look.<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
    <|close|>message<|sep|>

(without the line ends). The prompt opens `think` or `response`. In attributes `&` and `"` are escaped; in texts nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import partial
from html import unescape

from transom_core.text.markup.answer_format import AnswerFormat, message_expression, tools_to_hold
from transom_core.text.markup.context import (
    AnswerContext,
    FreeAnswer,
    MarkupTokenizer,
    MessageDemand,
    ToolsDemand,
    ToolSpec,
)
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.markup_parser import MarkupParser, TokenMarkerParser, TokenMarkers
from transom_core.text.markup.parameter_grammar import ParameterMarkup, parameter_rules
from transom_core.text.markup.parameters import ParameterWriter
from transom_core.text.markup.reader import (
    SPACE,
    AnswerEnded,
    MalformedMarkupError,
    Markers,
    MarkupReader,
    Reading,
)
from transom_core.text.markup.tool_markup import CallReading
from transom_core.text.markup.writer import PartsWriter

OPEN, CLOSE, SEPARATOR, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEPARATOR, END)
_THINK, _RESPONSE = "think", "response"
_ATTRIBUTE = r'="(?P<{0}>[^"]*)"\s*'
_CALL = re.compile(r"call\s+tool" + _ATTRIBUTE.format("name") + r'(?:index="[^"]*")?\s*')
_ARGUMENT = re.compile(r"argument\s+key" + _ATTRIBUTE.format("name") + "(?:type" + _ATTRIBUTE.format("type") + ")?")


class KimiK3Format(AnswerFormat):
    """Reasoning, message and calls in XTML."""

    def parser(self, tokenizer: MarkupTokenizer, context: AnswerContext) -> MarkupParser:
        """Return a parser for one answer."""
        markers = TokenMarkers(tokenizer, MARKERS)
        reader, writer = MarkupReader(), PartsWriter(keeps_space=True)
        answer = _Answer(reader, writer, context, markers)
        return TokenMarkerParser(answer.read(), reader, writer, tokenizer=tokenizer, markers=markers)

    def _held_grammar(
        self, tokenizer: MarkupTokenizer, context: AnswerContext, message: MessageDemand, tools: ToolsDemand | None
    ) -> str:
        """Return the grammar of an answer that is constrained; `message` constrains the text of the element `response`."""
        lark = LarkText(tokenizer)
        section = _open_section(context.prompt_end)
        begin = f"{lark.text_until(CLOSE)} {_end_of_tag(lark, _THINK)}" if section == _THINK else ""
        opened = "" if section == _RESPONSE else _tag(lark, OPEN, _RESPONSE)
        closed = _end_of_tag(lark, _RESPONSE)
        calls = "" if tools is None else _calls(lark, tools_to_hold(context, tools), parallel=tools.parallel)
        empty = f"{lark.marker(CLOSE)} {closed}"
        if isinstance(message, FreeAnswer):
            text = f"{lark.text_until(CLOSE)} {closed}"
        else:
            text = f"({message_expression(lark, message)}) {lark.marker(CLOSE)} {closed}"
        if tools is not None and tools.mode == "required":
            answer = f"{empty} {calls}"
        elif not calls:
            answer = text
        else:
            answer = f"{text} {calls}?" if isinstance(message, FreeAnswer) else f"({text} | {empty} {calls})"
        return lark.text(f"{begin} {opened} {answer} {_tag(lark, CLOSE, 'message')}")


class _Answer:
    """Reads one answer."""

    def __init__(
        self, reader: MarkupReader, writer: PartsWriter, context: AnswerContext, markers: TokenMarkers
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._parses_tools = context.parses_tools
        self._calls = CallReading(reader, writer, context.tools)
        self._m = markers
        self._tags = Markers((markers[OPEN], markers[CLOSE], markers[END]))
        self._tag_ends = Markers((markers[SEPARATOR], markers[OPEN], markers[CLOSE], markers[END]))
        self._close = Markers((markers[CLOSE],))
        if _open_section(context.prompt_end) == _THINK:
            writer.begin_section("reasoning")

    def read(self) -> Generator[None, None, None]:
        """Read all of the answer."""
        try:
            while True:
                marker = yield from self._reader.until(self._tags, self._writer.write)
                if marker != self._m[END]:
                    yield from self._read_tag(marker)
        except AnswerEnded:
            self._writer.end()

    def _read_tag(self, marker: str) -> Reading[None]:
        """Read a tag between the answer's sections, and the calls after a tag `tools`. An unknown tag is shown as text."""
        self._reader.keep(marker)
        try:
            text, end = yield from self._reader.text_until(self._tag_ends)
        except AnswerEnded:
            self._writer.drop_unfinished(self._reader.kept())
            raise
        markup, name = self._reader.kept(), text.strip(SPACE)
        is_open = marker == self._m[OPEN]
        if end == self._m[SEPARATOR] and name == "tools" and is_open and self._parses_tools:
            self._writer.begin_section("message")
            yield from self._calls.run(markup, self._read_calls)
        elif end == self._m[SEPARATOR] and name in (_THINK, _RESPONSE):
            self._writer.begin_section("reasoning" if is_open and name == _THINK else "message")
        elif end != self._m[SEPARATOR] or name.partition(" ")[0] not in ("message", "tools"):
            self._writer.write_malformed(markup)

    def _read_calls(self, calls: CallReading) -> Reading[None]:
        """Read the calls up to the end of `tools`."""
        reader = self._reader
        yield from reader.skip_space()
        while not (yield from reader.skip(self._m[CLOSE])):
            yield from reader.expect(self._m[OPEN])
            call = yield from self._read_attributes(_CALL)
            calls.begin(unescape(call["name"]))
            yield from self._read_arguments(ParameterWriter(calls, unescape(call["name"])))
            calls.end()
            yield from reader.skip_space()
        yield from reader.expect("tools" + self._m[SEPARATOR])

    def _read_arguments(self, parameters: ParameterWriter) -> Reading[None]:
        """Read a call's arguments, and the call's end."""
        reader = self._reader
        yield from reader.skip_space()
        while not (yield from reader.skip(self._m[CLOSE])):
            yield from reader.expect(self._m[OPEN])
            argument = yield from self._read_attributes(_ARGUMENT)
            is_string = argument["type"] == "string" if argument["type"] else None
            read = partial(reader.until, self._close)
            yield from parameters.read_typed(unescape(argument["name"]), is_string, read)
            yield from reader.expect("argument" + self._m[SEPARATOR])
            yield from reader.skip_space()
        yield from reader.expect("call" + self._m[SEPARATOR])
        parameters.end()

    def _read_attributes(self, pattern: re.Pattern[str]) -> Reading[re.Match[str]]:
        """Read the rest of an opening tag, and return its attributes as a match of `pattern`."""
        text, end = yield from self._reader.text_until(self._tag_ends)
        attributes = pattern.fullmatch(text)
        if attributes is None or end != self._m[SEPARATOR]:
            raise MalformedMarkupError
        return attributes


def _open_section(prompt_end: str) -> str | None:
    """Return the element that is open at the prompt's end, `think` or `response`; None if neither is."""
    for section in (_THINK, _RESPONSE):
        if prompt_end.rstrip(SPACE).endswith(f"{OPEN}{section}{SEPARATOR}"):
            return section
    return None


def _tag(lark: LarkText, marker: str, text: str) -> str:
    """Return a grammar's expression for a tag."""
    return f"{lark.marker(marker)} {_end_of_tag(lark, text)}"


def _end_of_tag(lark: LarkText, text: str) -> str:
    return f"{lark.literal(text)} {lark.marker(SEPARATOR)}"


def _calls(lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
    """Return a grammar's expression for the calls of an answer."""
    markup = ParameterMarkup(
        before_name=f"{lark.marker(OPEN)} {lark.literal('argument key=' + chr(34))}",
        before_value=lambda kind: _end_of_tag(lark, f'" type="{kind}"'),
        end=CLOSE,
        after=_end_of_tag(lark, "argument"),
        write_name=_escaped,
    )
    number = lark.terminal("number", "/[1-9][0-9]{0,2}/")
    calls = [
        f"{lark.literal(f'call tool={chr(34)}{_escaped(tool.name)}{chr(34)} index={chr(34)}')} {number} "
        f"{_end_of_tag(lark, chr(34))} {parameter_rules(lark, tool.parameters, markup)}"
        for tool in tools
    ]
    call = lark.rule("call", f"{lark.marker(OPEN)} ({' | '.join(calls)}) {_tag(lark, CLOSE, 'call')}")
    body = f"{_tag(lark, OPEN, 'tools')} {call}{'+' if parallel else ''} {_tag(lark, CLOSE, 'tools')}"
    return lark.rule("calls", body)


def _escaped(text: str) -> str:
    """Return a text escaped for an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")
