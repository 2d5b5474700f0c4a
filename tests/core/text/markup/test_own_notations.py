"""Random answers held to the grammars of the families that write calls in markup of their own are read back as valid calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.core.text.markup.canitoolcall_fixtures import read_answer
from tests.core.text.markup.grammar_walks import Walk, WalkTokenizer, walk
from tests.core.text.markup.read_calls import check_calls, message_of
from tests.how_many import num_examples
from transom_core.errors import RequestError
from transom_core.text.markup.context import (
    AnswerContext,
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    MessageDemand,
    ToolsDemand,
    ToolSpec,
)
from transom_core.text.markup.formats import answer_format
from transom_core.text.markup.parts import AnswerPart, CallBegin

MARKERS = {
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "kimi_k2": (
        "<think>",
        "</think>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "deepseek_v3": (
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "deepseek_v4": ("<think>", "</think>", "｜DSML｜"),
    "openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}
MARKERS |= {"glm47": MARKERS["glm45"], "deepseek_v31": MARKERS["deepseek_v3"]}
MARKERS |= {"deepseek_v32": MARKERS["deepseek_v4"], "deepseek_v41": MARKERS["deepseek_v4"]}
REASONING = {
    "glm47": "glm45",
    "deepseek_v31": "deepseek_v3",
    "openai": "openai_gptoss",
}
OPENERS = {
    "gemma4": "<|tool_call>",
    "glm45": "<tool_call>",
    "glm47": "<tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "deepseek_v41": "<｜DSML｜ calls>",
    "openai": "<|channel|>commentary to=",
    "kimi_k3": "<|close|>response<|sep|><|open|>tools<|sep|>",
}
PROMPT_ENDS = {"kimi_k3": "<|open|>think<|sep|>"}
BEGINNINGS = {
    "openai": "",
    "kimi_k3": "Rain?<|close|>think<|sep|><|open|>response<|sep|>Let me see.",
}  # before the openers
PARSERS = sorted(MARKERS)
TEXT_PARSERS = [name for name in PARSERS if name not in ("openai", "kimi_k3")]  # whose markers may be ordinary text
_HINTS = (
    *("<tool_call>", "<|tool_call>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>"),
    *(
        "<",
        "</",
        "</think>",
        "<channel|>",
        "<|end|>",
        '<|"|>',
        "</arg_value>",
        "</tool_call>",
        "｜DSML｜",
        '"',
        "}",
        "]",
        ">",
        "\n",
    ),
)

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "code": {"type": "string", "pattern": "^[A-Z]{2,3}$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["c", "f", None, 3]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}, "note": {"type": "string"}},
            "required": ["on"],
            "additionalProperties": False,
        },
        "count": {"type": ["integer", "null"]},
        "text": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
    },
    "required": ["text", "city", "tags", "count"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string"}},
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"const": "n"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "additionalProperties": False,
        }
    },
}
CHOICE: dict[str, Any] = {
    "type": "object",
    "anyOf": [
        {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
        {"properties": {"b": {"type": ["number", "null"]}}, "required": ["b"], "additionalProperties": False},
    ],
}
LOOP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        "w": {"$ref": "#/properties/v"},
        "u": {"type": "array", "items": {"$ref": "#/properties/v"}, "maxItems": 3},
    },
    "required": ["v", "kids", "u"],
    "additionalProperties": False,
}
TOOLS = (
    ToolSpec("loop", LOOP, strict=True),
    ToolSpec("place", PLACE, strict=True),
    ToolSpec("tree", TREE, strict=True),
    ToolSpec("choice", CHOICE, strict=True),
    ToolSpec("ping", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
    ToolSpec("anything", {}, strict=True),
)
NAMES = tuple(tool.name for tool in TOOLS)


def walks(
    parser: str, *, ordinary: bool = False, message: MessageDemand, tools: ToolsDemand | None, begin: str = ""
) -> list[list[AnswerPart]]:
    """The parts of complete random answers, which begin with `begin`."""
    tokenizer = WalkTokenizer(ordinary=ordinary, markers=MARKERS[parser])
    context = AnswerContext(TOOLS, parses_tools=True, parses_reasoning=True, prompt_end=PROMPT_ENDS.get(parser, ""))
    form = answer_format(parser, REASONING.get(parser, parser))
    grammar = form.grammar(tokenizer, context, message=message, tools=tools)
    assert grammar is not None
    hints = [hint for hint in _HINTS if hint in tokenizer.texts]
    answers = [walk(tokenizer, grammar, seed=seed, hints=hints, begin=begin) for seed in range(num_examples(4, 200))]
    complete = [answer for answer in answers if answer.is_complete]
    assert len(complete) > len(answers) / 3
    return [_read(form.parser(tokenizer, context), answer) for answer in complete]


def _read(parser: Any, answer: Walk) -> list[AnswerPart]:
    return read_answer(parser, answer.tokens)


@pytest.mark.parametrize(
    ("parser", "ordinary"), [(name, False) for name in PARSERS] + [(name, True) for name in TEXT_PARSERS]
)
def test_required_calls_are_valid_and_nothing_else(parser: str, ordinary: bool) -> None:
    for parts in walks(parser, ordinary=ordinary, message=FreeAnswer(), tools=ToolsDemand("required", NAMES)):
        assert check_calls(parts, TOOLS) >= 1
        assert not message_of(parts).strip()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parser", PARSERS)
def test_a_named_tool_is_called_once(parser: str, name: str) -> None:
    for parts in walks(parser, message=FreeAnswer(), tools=ToolsDemand("required", (name,), parallel=False)):
        assert [part.name for part in parts if isinstance(part, CallBegin)] == [name]
        check_calls(parts, TOOLS)


@pytest.mark.parametrize(
    ("parser", "ordinary"), [(name, False) for name in PARSERS] + [(name, True) for name in TEXT_PARSERS]
)
def test_calls_in_a_free_message_are_valid(parser: str, ordinary: bool) -> None:
    demand = ToolsDemand("auto", NAMES)
    for parts in walks(parser, ordinary=ordinary, message=FreeAnswer(), tools=demand):
        check_calls(parts, TOOLS)
    begin = BEGINNINGS.get(parser, "Let me see. ") + OPENERS[parser]
    for parts in walks(parser, ordinary=ordinary, message=FreeAnswer(), tools=demand, begin=begin):
        assert check_calls(parts, TOOLS) >= 1


@pytest.mark.parametrize("parser", PARSERS)
def test_a_message_is_json_or_a_call(parser: str) -> None:
    for parts in walks(parser, message=JsonAnswer(PLACE), tools=ToolsDemand("auto", NAMES)):
        if not check_calls(parts, TOOLS):
            jsonschema.validate(json.loads(message_of(parts)), PLACE)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_message_is_one_of_the_choices(parser: str) -> None:
    for parts in walks(parser, message=ChoiceAnswer(("yes", "no")), tools=None):
        assert message_of(parts) in ("yes", "no")


@pytest.mark.parametrize("parser", ["gemma4", "glm47", "deepseek_v4"])
def test_a_schema_that_the_notation_cannot_hold_is_refused_by_the_keyword(parser: str) -> None:
    tools = (ToolSpec("t", {"type": "object", "patternProperties": {"^a": {}}}, strict=True),)
    context = AnswerContext(tools, parses_tools=True)
    tokenizer = WalkTokenizer(markers=MARKERS[parser])
    with pytest.raises(RequestError, match="patternProperties"):
        answer_format(parser).grammar(tokenizer, context, message=FreeAnswer(), tools=ToolsDemand("required", ("t",)))
