"""Random schemas as tools in every family's markup: what its grammar allows is read back as a call that is valid, or the schema is
refused."""

import json
import random
from collections.abc import Iterable

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.core.grammar.random_schemas import random_schema
from tests.core.text.markup.canitoolcall_fixtures import call_arguments, read_answer
from tests.core.text.markup.grammar_walks import WalkTokenizer, compiled, walk
from tests.how_many import num_examples
from transom_core.errors import RequestError
from transom_core.text.markup.context import AnswerContext, FreeAnswer, JsonAnswer, RegexAnswer, ToolsDemand, ToolSpec
from transom_core.text.markup.formats import TOOL_PARSERS, answer_format
from transom_core.text.markup.parts import AnswerPart, CallBegin, CallEnd, MessageText, ReasoningText

_HINTS = ('"', "}", "]", ">", "\n", "\n</parameter>")


@pytest.mark.parametrize("ordinary", [False, True], ids=["markers", "ordinary"])
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_calls_of_random_tools_are_valid(parser: str, ordinary: bool) -> None:
    tokenizer = WalkTokenizer(ordinary=ordinary)
    num_valid = 0
    for seed in range(num_examples(6, 200)):
        tool = ToolSpec("f", random_schema(random.Random(seed)), strict=True)
        context = AnswerContext((tool,), parses_tools=True)
        form = answer_format(parser)
        try:
            grammar = form.grammar(
                tokenizer, context, message=FreeAnswer(), tools=ToolsDemand("required", ("f",), parallel=False)
            )
        except RequestError:
            continue
        assert grammar is not None
        answer = walk(tokenizer, compiled(tokenizer, grammar), seed=seed, hints=_HINTS, longest=800)
        if answer.is_complete:
            arguments = _only_call(read_answer(form.parser(tokenizer, context), answer.tokens))
            jsonschema.Draft202012Validator(tool.parameters).validate(json.loads(arguments))
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
            answer = walk(tokenizer, compiled(tokenizer, grammar), seed=1)
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
