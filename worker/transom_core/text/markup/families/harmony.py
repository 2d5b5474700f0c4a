"""The parser `openai`, for gpt-oss's harmony format: an answer consists of messages, whose headers name channel and recipient.

    <|channel|>analysis<|message|>Rain?<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

(without the line ends). Channel `analysis` is the reasoning; `final` and `commentary` are the message to the user. A message for
`functions.NAME` is a call, in any channel. The prompt ends with `<|start|>assistant`, so an answer begins inside a header.
`<|call|>` and `<|return|>` end an answer.

Wrong headers are read as far as possible: the last of two channels counts, and a message without `<|message|>` is shown as text. A
message for a tool that the request does not have (gpt-oss was trained with `python` and `browser`) is not for the user: it is not
shown, but counted, as a `MalformedMarkup` with its text.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from transom_core.text.markup.answer_format import AnswerFormat, message_expression, tools_to_hold
from transom_core.text.markup.context import (
    AnswerContext,
    FreeAnswer,
    JsonAnswer,
    MarkupTokenizer,
    MessageDemand,
    ToolsDemand,
    ToolSpec,
)
from transom_core.text.markup.json_reader import copy_value
from transom_core.text.markup.lark import LarkText, arguments_schema
from transom_core.text.markup.markup_parser import MarkupParser, TokenMarkerParser, TokenMarkers
from transom_core.text.markup.reader import (
    SPACE,
    AnswerEnded,
    MalformedMarkupError,
    Markers,
    MarkupReader,
    Reading,
    Write,
)
from transom_core.text.markup.writer import PartsWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_PROMPT_END = "<|start|>assistant"
_FUNCTIONS = "functions."
_CONTENT_TYPES = ("", "json", "code", "text")
_CHANNELS = (None, "analysis", "commentary", "final")
# The texts after START (role, recipient) and after CHANNEL (channel, recipient, content type), in which every part may be missing.
# Instead of CONSTRAIN, models may write a text that begins with `<`.
_ROLE = re.compile(r"\s*(?P<name>[\w.]+(?=\s|$))?\s*(?:to=(?P<recipient>[^\s<]+))?(?:<\S*)?\s*")
_CHANNEL = re.compile(r"\s*(?P<name>\w+(?=\s|$))?\s*(?:to=(?P<recipient>[^\s<]+))?(?:<\S*)?\s*(?:json|code|text)?\s*")


@dataclass(frozen=True, slots=True)
class _Header:
    """What a message's header says."""

    channel: str | None
    recipient: str | None
    is_sound: bool  # the whole header could be read
    is_usual: bool  # the header has only what the format prescribes


class HarmonyFormat(AnswerFormat):
    """Reasoning, message and calls in harmony's channels."""

    def parser(self, tokenizer: MarkupTokenizer, context: AnswerContext) -> MarkupParser:
        """Return a parser for one answer."""
        markers = TokenMarkers(tokenizer, MARKERS)
        reader, writer = MarkupReader(), PartsWriter()
        answer = _Answer(reader, writer, context, markers)
        return TokenMarkerParser(answer.read(), reader, writer, tokenizer=tokenizer, markers=markers)

    def _held_grammar(
        self, tokenizer: MarkupTokenizer, context: AnswerContext, message: MessageDemand, tools: ToolsDemand | None
    ) -> str:
        """Return the grammar of an answer that is constrained.

        Before the last message there may be reasoning in the analysis channel, and, with a free message, text in the commentary
        channel. The last message is in the final channel and as `message` demands, or is a call that `tools` allows. A harmony
        answer has one call at most, because `<|call|>` ends it.
        """
        lark = LarkText(tokenizer)
        is_free = isinstance(message, FreeAnswer)
        demands_call = tools is not None and tools.mode == "required"
        last = [] if demands_call else [_final(lark, message)]
        if tools is not None:
            last += [_call(lark, tool) for tool in tools_to_hold(context, tools)]
        channels = ("analysis", "commentary") if is_free and not demands_call else ("analysis",)
        before = lark.rule("before", " | ".join(_message_before(lark, channel) for channel in channels))
        return lark.text(f"{before}* {lark.rule('last', ' | '.join(last))}")


class _Answer:
    """Reads one answer."""

    def __init__(
        self, reader: MarkupReader, writer: PartsWriter, context: AnswerContext, markers: TokenMarkers
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._parses_tools = context.parses_tools
        self._tools = {tool.name for tool in context.tools}
        self._m = markers
        self._marks = Markers(markers[text] for text in MARKERS)
        self._marker_begins = tuple(markers[text][0] for text in MARKERS)
        self._strays = (markers[MESSAGE], markers[CONSTRAIN])
        reader.feed(markers.read_as(_begun_header(context.prompt_end)))

    def read(self) -> Generator[None, None, None]:
        """Read all of the answer."""
        marker = self._m[START]
        try:
            if not (yield from self._begins_header()):
                marker = yield from self._read_text(self._writer.write)
            while True:
                while marker not in (self._m[START], self._m[CHANNEL]):  # text between messages is shown
                    marker = yield from self._reader.until(self._marks, self._writer.write)
                marker = yield from self._read_message(marker)
                self._writer.begin_section("message")
        except AnswerEnded:
            self._writer.end()

    def _begins_header(self) -> Reading[bool]:
        """Return whether the answer begins with a header: a marker or a recipient. Other text is a message without a header."""
        if (yield from self._reader.peek()) in self._marker_begins:
            return True
        return (yield from self._reader.next_is(" to=")) or (yield from self._reader.next_is("to="))

    def _read_message(self, marker: str) -> Reading[str]:
        """Read a message with its header, which follows `marker`. Return the marker at the message's end."""
        header, end = yield from self._read_header(marker)
        if header is None:
            return end
        name = self._tool(header)
        if name is not None:
            return (yield from self._read_call(name))
        if self._is_for_unknown(header.recipient):
            return (yield from self._read_unknown_call())
        self._writer.begin_section("reasoning" if header.channel == "analysis" else "message")
        return (yield from self._read_text(self._writer.write))

    def _tool(self, header: _Header) -> str | None:
        """Return the name of the tool that a message calls; None if the message is not a call."""
        recipient = header.recipient
        if recipient is None or not self._parses_tools:
            return None
        if recipient.startswith(_FUNCTIONS) and len(recipient) > len(_FUNCTIONS):
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._tools else None

    @staticmethod
    def _is_for_unknown(recipient: str | None) -> bool:
        return recipient not in (None, "assistant") and not str(recipient).startswith(_FUNCTIONS)

    def _read_header(self, marker: str) -> Reading[tuple[_Header | None, str]]:
        """Read a header. Return it, or None if no message follows it, and the marker at its end. If a header without a message has
        text, the header is shown."""
        sections: list[tuple[str, list[str]]] = [(START, [])]  # the marker before a text, and the text
        if marker == self._m[CHANNEL]:
            sections.append((CHANNEL, []))
        self._reader.keep(marker if marker == self._m[CHANNEL] else "")
        try:
            while True:
                marker = yield from self._reader.until(self._marks, sections[-1][1].append)
                if marker not in (self._m[CHANNEL], self._m[CONSTRAIN]):
                    break
                sections.append((CHANNEL if marker == self._m[CHANNEL] else CONSTRAIN, []))
        except AnswerEnded:
            self._give_up_header(is_sound=_parse(sections).is_sound)
            raise
        if marker == self._m[MESSAGE]:
            return self._checked(_parse(sections)), marker
        self._give_up_header(is_sound=not any("".join(texts).strip(SPACE) for _, texts in sections))
        return None, marker

    def _checked(self, header: _Header) -> _Header:
        markup = self._reader.kept()
        if not header.is_sound:
            self._writer.begin_section("message")
            self._writer.write_malformed(markup)
        elif not header.is_usual:
            self._writer.drop_unfinished(markup)
        return header

    def _give_up_header(self, *, is_sound: bool) -> None:
        """Drop a header without a message; if it could not be read as a header, show it, because it was meant for the user."""
        markup = self._reader.kept()
        if not is_sound:
            self._writer.begin_section("message")
            self._writer.write_malformed(markup)
        elif markup.strip(SPACE):
            self._writer.drop_unfinished(markup)

    def _read_text(self, write: Write) -> Reading[str]:
        """Read a message's text. Return the marker at its end. Stray `<|message|>` and `<|constrain|>` in the text are left out."""
        end = self._m[MESSAGE]
        while end in self._strays:
            end = yield from self._reader.until(self._marks, write)
        return end

    def _read_call(self, name: str) -> Reading[str]:
        """Read the arguments of a call, and any text after them. Return the marker at the call's end."""
        self._writer.reads_call = True
        self._writer.begin_call(name)
        try:
            yield from self._read_arguments()
        except MalformedMarkupError:
            self._writer.end_call(is_complete=False)
        except AnswerEnded:
            self._writer.end_call(is_complete=False)
            raise
        finally:
            self._writer.reads_call = False
        return (yield from self._read_text(self._writer.write))

    def _read_unknown_call(self) -> Reading[str]:
        """Read a message for a tool that the request does not have, and drop it. Return the marker at its end."""
        pieces: list[str] = []
        self._writer.reads_call = True
        try:
            return (yield from self._read_text(pieces.append))
        finally:
            self._writer.reads_call = False
            self._writer.drop_unfinished("".join(pieces))

    def _read_arguments(self) -> Reading[None]:
        yield from self._reader.skip_space()
        first = yield from self._reader.peek()
        if first == "{":
            yield from copy_value(self._reader, self._writer.write_arguments)
        elif first in (self._m[END], self._m[CALL]):
            self._writer.write_arguments("{}")
        else:
            raise MalformedMarkupError
        self._writer.end_call(is_complete=True)


def _message_before(lark: LarkText, channel: str) -> str:
    """Return a grammar's expression for a message in a channel, and for the beginning of the next message."""
    begin = f"{lark.marker(CHANNEL)} {lark.literal(channel)} {lark.marker(MESSAGE)}"
    return f"{begin} {lark.text_until(END)} {lark.marker(START)} {lark.literal('assistant')}"


def _final(lark: LarkText, message: MessageDemand) -> str:
    begin = f"{lark.marker(CHANNEL)} {lark.literal('final')}"
    if isinstance(message, JsonAnswer):
        begin += f" ({lark.literal(' ')} {lark.marker(CONSTRAIN)} {lark.literal('json')})?"
    return f"{begin} {lark.marker(MESSAGE)} ({message_expression(lark, message)})"


def _call(lark: LarkText, tool: ToolSpec) -> str:
    """Return a grammar's expression for a call; the recipient comes after the channel or before it, since models write both."""
    recipient = f"to={_FUNCTIONS}{tool.name}"
    channel_first = f"{lark.marker(CHANNEL)} {lark.literal(f'commentary {recipient} ')}"
    role_first = f"{lark.literal(f' {recipient}')} {lark.marker(CHANNEL)} {lark.literal('commentary ')}"
    arguments = (
        f"{lark.marker(CONSTRAIN)} {lark.literal('json')} {lark.marker(MESSAGE)} {lark.json(arguments_schema(tool))}"
    )
    return f"({channel_first} | {role_first}) {arguments}"


def _parse(sections: Sequence[tuple[str, Sequence[str]]]) -> _Header:
    """Return what a header says. `sections` has, for each marker of the header, the marker and the pieces of text after it."""
    role = _ROLE.fullmatch("".join(sections[0][1]))
    texts = ["".join(pieces) for marker, pieces in sections if marker == CHANNEL]
    content_types = ["".join(pieces).strip(SPACE) for marker, pieces in sections if marker == CONSTRAIN]
    channels = [match for text in texts if (match := _CHANNEL.fullmatch(text))]
    channel = channels[-1]["name"] if channels else None
    recipients = [match["recipient"] for match in (*channels[-1:], role) if match and match["recipient"]]
    return _Header(
        channel=channel,
        recipient=recipients[0] if recipients else None,
        is_sound=role is not None and len(channels) == len(texts),
        is_usual=role is not None
        and role["name"] in (None, "assistant")
        and len(texts) < 2
        and channel in _CHANNELS
        and all(each in _CONTENT_TYPES for each in content_types),
    )


def _begun_header(prompt_end: str) -> str:
    """Return the part of the answer's first header, after its role, that is in the prompt already."""
    _, start, begun = prompt_end.rpartition(_PROMPT_END)
    return begun[: begun.rfind(MESSAGE) + len(MESSAGE)] if start and MESSAGE in begun else begun if start else ""
