"""Random schemas as tools in every family's markup: what its grammar allows is read back as a call that is valid, or the schema is
refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.core.text.markup.canitoolcall_fixtures import call_arguments, read_answer
from tests.core.text.markup.grammar_walks import WalkTokenizer, walk
from tests.how_many import num_examples
from transom_core.errors import RequestError
from transom_core.text.markup.context import AnswerContext, FreeAnswer, JsonAnswer, RegexAnswer, ToolsDemand, ToolSpec
from transom_core.text.markup.formats import TOOL_PARSERS, answer_format
from transom_core.text.markup.parts import AnswerPart, CallBegin, CallEnd, MessageText, ReasoningText

WORDS = ("id", "name", "née", "a b", 'quote"', "back\\slash", "x-1", "", "名前", "nested")
FORMATS = ("date", "uuid", "ipv4", "time")
_HINTS = ('"', "}", "]", ">", "\n", "\n</parameter>")


@pytest.mark.parametrize("ordinary", [False, True], ids=["markers", "ordinary"])
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_calls_of_random_tools_are_valid(parser: str, ordinary: bool) -> None:
    tokenizer = WalkTokenizer(ordinary=ordinary)
    num_valid = 0
    for seed in range(num_examples(6, 200)):
        tool = ToolSpec("f", _random_schema(random.Random(seed)), strict=True)
        context = AnswerContext((tool,), parses_tools=True)
        form = answer_format(parser)
        try:
            grammar = form.grammar(
                tokenizer, context, message=FreeAnswer(), tools=ToolsDemand("required", ("f",), parallel=False)
            )
        except RequestError:
            continue
        assert grammar is not None
        answer = walk(tokenizer, grammar, seed=seed, hints=_HINTS, longest=800)
        if answer.is_complete:
            arguments = _only_call(read_answer(form.parser(tokenizer, context), answer.tokens))
            jsonschema.validate(json.loads(arguments), tool.parameters)
            num_valid += 1
    assert num_valid


def _only_call(parts: Iterable[AnswerPart]) -> str:
    """The arguments of the call that an answer is."""
    parts = list(parts)
    assert [part for part in parts if isinstance(part, MessageText | ReasoningText)] == []
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"]
    assert [part.is_complete for part in parts if isinstance(part, CallEnd)] == [True]
    return call_arguments(parts, 0)


@pytest.mark.parametrize(
    ("parser", "name"), [("pythonic", "a b"), ("qwen3_coder", "a>b"), ("deepseek_v4", 'a"b'), ("gemma4", "a:b")]
)
def test_a_required_argument_whose_name_cannot_be_written_is_refused_and_another_left_out(
    parser: str, name: str
) -> None:
    tokenizer = WalkTokenizer()
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": False}
    for required in ([name], []):
        tool = ToolSpec("f", {**schema, "required": required}, strict=True)
        context = AnswerContext((tool,), parses_tools=True)
        form, demand = answer_format(parser), ToolsDemand("required", ("f",), parallel=False)
        if required:
            with pytest.raises(RequestError, match="cannot write"):
                form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand)
        else:
            grammar = form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand)
            assert grammar is not None
            answer = walk(tokenizer, grammar, seed=1)
            assert _only_call(read_answer(form.parser(tokenizer, context), answer.tokens)) == "{}"


def test_digits_and_word_characters_of_a_pattern_are_ascii() -> None:
    tokenizer = WalkTokenizer()
    for pattern, text in ((r"^\d$", "٣"), (r"^[\w-]$", "é"), (r"^\d$", "3"), (r"^[\w/-]$", "/")):
        grammar = answer_format().grammar(tokenizer, AnswerContext(), message=RegexAnswer(pattern[1:-1]))
        assert grammar is not None
        letters = tokenizer(text.encode())
        assert (LLMatcher(tokenizer.library, grammar).validate_tokens(letters) == len(letters)) is text.isascii()


def test_a_schema_that_allows_nothing_is_not_taken_for_one_that_allows_everything() -> None:
    grammar = answer_format().grammar(WalkTokenizer(), AnswerContext(), message=JsonAnswer(False))
    assert grammar is not None
    assert "Unsatisfiable" in LLMatcher.validate_grammar(grammar)


def _random_schema(random_of: random.Random) -> dict[str, Any]:
    """An object of a few properties, some levels deep at most."""
    schema = _object(random_of, 2)
    if random_of.random() < 0.3:
        schema = {"$defs": {"part": _value(random_of, 1)}, **schema}
        name = random_of.choice(WORDS)
        schema["properties"] = {**schema["properties"], name: {"$ref": "#/$defs/part"}}
        schema["required"] = sorted({*schema["required"], name})
    return schema


def _object(random_of: random.Random, depth: int) -> dict[str, Any]:
    names = random_of.sample(WORDS, random_of.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(random_of, depth) for name in names},
        "required": random_of.sample(names, random_of.randint(0, len(names))),
        "additionalProperties": False,
    }


def _value(random_of: random.Random, depth: int) -> dict[str, Any]:
    made = random_of.choice([_string, _number, _choice, *([_object, _array, _either] if depth else [])])
    return made(random_of, depth - 1)


def _string(random_of: random.Random, depth: int) -> dict[str, Any]:
    shortest = random_of.randint(0, 3)
    return random_of.choice(
        [
            {"type": "string", "minLength": shortest, "maxLength": shortest + random_of.randint(0, 6)},
            {"type": "string", "pattern": random_of.choice(["^[a-f]{2,5}$", "^(yes|no)!*$", "^\\d+(\\.\\d{2})?$"])},
            {"type": "string", "format": random_of.choice(FORMATS)},
            {"type": ["string", "null"], "maxLength": 4},
        ]
    )


def _number(random_of: random.Random, depth: int) -> dict[str, Any]:
    low = random_of.randint(-200, 200)
    return random_of.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + random_of.randint(0, 90)},
            {"type": "integer", "exclusiveMinimum": low, "maximum": low + 900, "multipleOf": 3},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + 0.5},
        ]
    )


def _choice(random_of: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", "a\nb", 'c"d', 1, 2.5, None, True, [1, "x"], {"k": "é"}]
    return random_of.choice(
        [
            {"enum": random_of.sample(values, random_of.randint(1, 5))},
            {"const": random_of.choice(values)},
            {"type": "boolean"},
        ]
    )


def _array(random_of: random.Random, depth: int) -> dict[str, Any]:
    fewest = random_of.randint(0, 2)
    made = {"type": "array", "items": _value(random_of, depth), "minItems": fewest}
    if random_of.random() < 0.3:
        made["prefixItems"] = [_value(random_of, depth)]
    return {**made, "maxItems": fewest + random_of.randint(0, 3)}


def _either(random_of: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(random_of, depth) for _ in range(random_of.randint(1, 3))]}
