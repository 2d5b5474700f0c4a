"""gpt-oss's answers are read as OpenAI's own library reads them.

`harmony_answers.json` has random answers as pieces, [text, 1 where it is one special token], each with the messages that
`openai-harmony` 0.0.8 reads in it. The library takes any text in a header, and a marker inside a message as text, where this
parser lets the marker begin the next message; answers of these kinds are left out. Together they have every run of four
pieces (markers, headers, kinds of text) and every end that 169 random ones had. Git has the script that recorded them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from canitoolcall.results import ParsedToolCall, ParseResult

from tests.core.text.markup.canitoolcall_fixtures import FixtureTokenizer, parse_result, read_answer
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.families.harmony import MARKERS, HarmonyFormat
from transom_core.text.markup.formats import answer_format
from transom_core.text.markup.parts import AnswerPart, CallBegin, CallEnd, MalformedMarkup, MessageText, ReasoningText

TOKENIZER = FixtureTokenizer(MARKERS)
PROMPT_END = "<|start|>assistant"
ANSWERS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("harmony_answers.json").read_text("utf-8"))


def _context(*, prompt_end: str = PROMPT_END, parses_tools: bool = True) -> AnswerContext:
    tools = (ToolSpec("f"), ToolSpec("get_weather"))
    return AnswerContext(tools, parses_tools=parses_tools, parses_reasoning=True, prompt_end=prompt_end)


def _read(pieces: list[tuple[str, int]], context: AnswerContext) -> list[AnswerPart]:
    """The parts of an answer of special tokens, and of ordinary text that is cut into characters."""
    tokens: list[tuple[int, str]] = []
    for text, is_special in pieces:
        tokens += [(TOKENIZER.marker_id(text) or 0, "")] if is_special else [(0, character) for character in text]
    return read_answer(HarmonyFormat().parser(TOKENIZER, context), tokens)


def _cut(text: str) -> list[tuple[str, int]]:
    return [
        (TOKENIZER.token(i) or piece, int(TOKENIZER.is_special(i)))
        for i, piece in TOKENIZER.cut(text, shows_special=False)
    ]


def _said_by_the_library(messages: list[dict[str, Any]]) -> ParseResult:
    calls = [message for message in messages if message["recipient"]]
    others = [message for message in messages if not message["recipient"]]
    thoughts = [message["text"] for message in others if message["channel"] == "analysis" and message["text"]]
    return ParseResult(
        content="".join(message["text"] for message in others if message["channel"] != "analysis") or None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=tuple(ParsedToolCall(one["recipient"].removeprefix("functions."), one["text"]) for one in calls),
    )


def test_answers_are_read_as_openais_library_reads_them() -> None:
    for answer in ANSWERS:
        assert parse_result(_read(answer["pieces"], _context())) == _said_by_the_library(answer["messages"]), answer


@pytest.mark.parametrize(
    ("text", "context", "parts"),
    [
        # It goes on from a header that the prompt has begun.
        ("Rain.<|return|>", _context(prompt_end=f"{PROMPT_END}<|channel|>final<|message|>"), [MessageText("Rain.")]),
        (
            "Rain?<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            _context(prompt_end=f"{PROMPT_END}<|channel|>analysis<|message|>"),
            [ReasoningText("Rain?"), MessageText("Yes.")],
        ),
        # A message for a tool that there is not is counted and not shown.
        (
            "<|channel|>commentary to=python <|constrain|>code<|message|>print(1)<|call|>",
            _context(),
            [MalformedMarkup("print(1)")],
        ),
        # A call is a message where the request has no tools.
        (
            '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
            _context(parses_tools=False),
            [MessageText('{"a": 1}')],
        ),
        # Arguments that are no object leave the call incomplete.
        (
            "<|channel|>commentary to=functions.f<|message|>[1]<|call|>",
            _context(),
            [CallBegin(0, "f"), CallEnd(0, is_complete=False), MessageText("[1]")],
        ),
    ],
)
def test_an_answer(text: str, context: AnswerContext, parts: list[AnswerPart]) -> None:
    assert _read(_cut(text), context) == parts


@pytest.mark.parametrize("names", [("openai", None), (None, "openai_gptoss"), ("openai", "openai_gptoss")])
def test_either_name_stands_for_the_whole_format(names: tuple[str | None, str | None]) -> None:
    assert isinstance(answer_format(*names), HarmonyFormat)


@pytest.mark.parametrize("text", ["Rain is likely.", " tomorrow", "tonight it", "to", '{"a": 1}'])
def test_an_answer_without_a_header_is_a_message_as_it_comes(text: str) -> None:
    parser = HarmonyFormat().parser(TOKENIZER, _context())
    parts = [part for character in text for part in parser.push(0, character)]
    assert parts or text == "to"
    assert "".join(part.text for part in (*parts, *parser.flush()) if isinstance(part, MessageText)) == text
