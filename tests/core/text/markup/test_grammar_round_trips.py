"""What a grammar allows, the parser of the same format reads back: random answers of every family, held to its grammar."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.core.text.markup.canitoolcall_fixtures import read_answer
from tests.core.text.markup.grammar_walks import WalkTokenizer, walk
from tests.core.text.markup.read_calls import check_calls, message_of
from tests.how_many import num_examples
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import (
    AnswerContext,
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    LarkAnswer,
    MessageDemand,
    RegexAnswer,
    ToolsDemand,
    ToolSpec,
)
from transom_core.text.markup.formats import answer_format
from transom_core.text.markup.parts import AnswerPart, CallBegin

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}},
            "required": ["x", "on"],
        },
        "text": {"type": ["string", "null"]},
    },
    "required": ["tags", "at", "text"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string"}},
}
TOOLS = (
    ToolSpec("get_weather", WEATHER, strict=True),
    ToolSpec("note", NOTE, strict=True),
    ToolSpec("ping", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
)
PARSERS = [
    ("hermes", None),
    ("hermes", "qwen3"),
    ("hermes", "deepseek_r1"),
    ("llama3_json", None),
    ("llama4_pythonic", None),
    ("pythonic", "qwen3"),
    ("mistral", "mistral"),
    ("granite", "granite"),
    ("qwen3_coder", "qwen3"),
]
_HINTS = (
    "Here is my response:",
    "</think>",
    "[/THINK]",
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call|>",
    "\n</parameter>",
    '"',
    "}",
    "]",
    ">",
    "\n",
)


def _walks(
    parsers: tuple[str | None, str | None],
    *,
    ordinary: bool,
    message: MessageDemand,
    tools: ToolsDemand | None = None,
    prompt_end: str = "",
) -> list[list[AnswerPart]]:
    """The parts of complete random answers."""
    tokenizer = WalkTokenizer(ordinary=ordinary)
    context = AnswerContext(
        TOOLS, parses_tools=tools is not None, parses_reasoning=parsers[1] is not None, prompt_end=prompt_end
    )
    form: AnswerFormat = answer_format(*parsers)
    grammar = form.grammar(tokenizer, context, message=message, tools=tools)
    assert grammar is not None
    hints = [hint for hint in _HINTS if hint in tokenizer.texts]
    walks = [walk(tokenizer, grammar, seed=seed, hints=hints) for seed in range(num_examples(12, 200))]
    complete = [answer for answer in walks if answer.is_complete]
    assert len(complete) > len(walks) / 3
    return [read_answer(form.parser(tokenizer, context), answer.tokens) for answer in complete]


def _ids(parsers: tuple[str, str | None]) -> str:
    return "-".join(map(str, parsers))


@pytest.mark.parametrize("ordinary", [False, True], ids=["markers", "ordinary"])
@pytest.mark.parametrize("parsers", PARSERS, ids=_ids)
@pytest.mark.parametrize("parallel", [False, True], ids=["one", "parallel"])
def test_required_calls_are_valid_and_nothing_else(parsers, ordinary, parallel) -> None:
    demand = ToolsDemand("required", tuple(tool.name for tool in TOOLS), parallel)
    for parts in _walks(parsers, ordinary=ordinary, message=FreeAnswer(), tools=demand):
        num_calls = check_calls(parts, TOOLS)
        assert num_calls >= 1 if parallel else num_calls == 1
        assert not message_of(parts)


@pytest.mark.parametrize("parsers", PARSERS, ids=_ids)
def test_a_named_tool_is_called(parsers) -> None:
    for parts in _walks(parsers, ordinary=False, message=FreeAnswer(), tools=ToolsDemand("required", ("note",), False)):
        assert [part.name for part in parts if isinstance(part, CallBegin)] == ["note"]
        check_calls(parts, TOOLS)


@pytest.mark.parametrize("ordinary", [False, True], ids=["markers", "ordinary"])
@pytest.mark.parametrize("parsers", PARSERS, ids=_ids)
def test_calls_in_a_free_message_are_valid(parsers, ordinary) -> None:
    demand = ToolsDemand("auto", tuple(tool.name for tool in TOOLS))
    answers = _walks(parsers, ordinary=ordinary, message=FreeAnswer(), tools=demand)
    counts = [check_calls(parts, TOOLS) for parts in answers]
    assert any(counts)


@pytest.mark.parametrize("parsers", PARSERS, ids=_ids)
@pytest.mark.parametrize("prompt_end", ["", "<think>\n", "<think>\n\n</think>\n\n"], ids=["none", "open", "closed"])
def test_a_message_is_json_or_a_call(parsers, prompt_end) -> None:
    demand = ToolsDemand("auto", tuple(tool.name for tool in TOOLS))
    for parts in _walks(parsers, ordinary=False, message=JsonAnswer(NOTE), tools=demand, prompt_end=prompt_end):
        if not check_calls(parts, TOOLS):
            jsonschema.validate(json.loads(message_of(parts)), NOTE)


@pytest.mark.parametrize(
    ("message", "is_valid"),
    [
        (JsonAnswer(), lambda text: isinstance(json.loads(text), dict)),
        (JsonAnswer({"type": "array", "items": {"type": "integer"}}), lambda text: isinstance(json.loads(text), list)),
        (LarkAnswer('start: "a" b\nb: "b/{" | "c"'), lambda text: text in ("ab/{", "ac")),
        (RegexAnswer("a/b\\/[0-9]"), lambda text: text[:4] == "a/b/" and text[4].isdigit()),
        (ChoiceAnswer(("yes\n", 'no"')), lambda text: text in ("yes\n", 'no"')),
    ],
    ids=["object", "array", "lark", "regex", "choice"],
)
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
def test_a_message_is_what_it_has_to_be(message, is_valid, reasoning) -> None:
    for parts in _walks((None, reasoning), ordinary=False, message=message):
        assert is_valid(message_of(parts)), message_of(parts)


@pytest.mark.parametrize(
    ("parsers", "prompt_end", "marker"),
    [
        (("hermes", None), "", "<tool_call>"),
        (("hermes", "qwen3"), "<think>", "<tool_call>"),
        (("hermes", "qwen3"), "<think>", "</think>"),
        (("llama3_json", None), "", "<|python_tag|>"),
        (("llama4_pythonic", None), "", "<|python_start|>"),
        (("mistral", "mistral"), "", "[TOOL_CALLS]"),
        (("mistral", "mistral"), "[THINK]", "[/THINK]"),
        (("granite", None), "", "<tool_call>"),
        (("qwen3_coder", None), "", "<function="),
    ],
)
def test_a_marker_that_is_a_token_cannot_be_spelled(parsers, prompt_end, marker) -> None:
    """A parser takes the letters for the marker, so that what follows would escape the grammar."""
    tokenizer = WalkTokenizer()
    context = AnswerContext(TOOLS, parses_tools=True, parses_reasoning=True, prompt_end=prompt_end)
    demand = ToolsDemand("auto", tuple(tool.name for tool in TOOLS))
    grammar = answer_format(*parsers).grammar(tokenizer, context, message=FreeAnswer(), tools=demand)
    assert grammar is not None
    letters = tokenizer(f"Hi {marker}".encode())
    assert LLMatcher(tokenizer.library, grammar).validate_tokens(letters) == len(letters) - 1
