"""The parts of an answer, which a parser (`MarkupParser`) returns in order.

Example: the answer `<think>Rain?</think><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>` is

    ReasoningText("Rain?")
    CallBegin(0, "get_weather")
    CallArguments(0, '{"city": "Paris"}')
    CallEnd(0, is_complete=True)

Text and arguments come in pieces, as the answer comes in tokens. The tokens decide where the pieces are cut; the joined text of the
pieces does not depend on them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

AnswerState = Literal["reasoning", "message", "tool_call"]


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class MessageText:
    """A piece of the message to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins, and its name is complete. `index` counts an answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, as JSON text. All pieces of a complete call make one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended. `is_complete` is False if the answer ended inside the call, or its markup was malformed."""

    index: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class MalformedMarkup:
    """Markup of a call that could not be read up to the call's name; metrics count it.

    If the markup was wrong, its text follows as `MessageText` (or `ReasoningText`). If the answer ended inside the markup, only
    this part has the text.
    """

    text: str


AnswerPart = ReasoningText | MessageText | CallBegin | CallArguments | CallEnd | MalformedMarkup


def join_parts(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Return the parts with neighbours of one kind joined. The result does not depend on how the answer was cut into tokens."""
    return [_join(list(group)) for _, group in groupby(parts, _kind)]


def _kind(part: AnswerPart) -> object:
    if isinstance(part, ReasoningText | MessageText):
        return type(part)
    return ("arguments", part.index) if isinstance(part, CallArguments) else part


def _join(parts: list[AnswerPart]) -> AnswerPart:
    """Return several parts of one kind as one part."""
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, ReasoningText | MessageText | CallArguments):
        return first
    text = "".join(part.text for part in parts if not isinstance(part, CallBegin | CallEnd))
    return replace(first, text=text)
