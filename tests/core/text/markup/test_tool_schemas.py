"""Tools' schemas in notations other than JSON: what they cost to read, which are refused, and what the others allow."""

import json
from typing import Any

import pytest

from tests.core.text.markup.canitoolcall_fixtures import call_arguments, read_answer
from tests.core.text.markup.grammar_walks import WalkTokenizer, with_texts
from tests.present import present
from transom_core.errors import RequestError
from transom_core.text.markup import schema_types
from transom_core.text.markup.context import AnswerContext, FreeAnswer, ToolsDemand, ToolSpec
from transom_core.text.markup.formats import answer_format

STRING = {"type": "string"}
NOTATIONS = ("qwen3_coder", "glm45", "gemma4", "pythonic", "minimax_m2", "deepseek_v32", "seed_oss")
TEXTS = ("qwen3_coder", "gemma4", "deepseek_v32")  # strings are texts without quotes and escapes


def of(value: Any, **more: Any) -> dict[str, Any]:
    """A schema of an object with one argument."""
    return {"type": "object", "properties": {"a": value}, "required": ["a"], **more}


def grammar_of(parser: str, schema: dict[str, Any]) -> str:
    """The grammar of an answer that calls the tool `f`."""
    context = AnswerContext((ToolSpec("f", schema),), parses_tools=True)
    tokenizer, demand = WalkTokenizer(markers=()), ToolsDemand("required", ("f",))
    return present(answer_format(parser).grammar(tokenizer, context, message=FreeAnswer(), tools=demand))


def refusal(parser: str, schema: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        grammar_of(parser, schema)
    return str(caught.value)


@pytest.mark.parametrize("num_references", [2, 9])
def test_a_reference_is_followed_once(num_references: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a schema that refers to itself k times cost k^8 steps on the event loop."""
    followed: list[str] = []
    find = schema_types.referenced

    def follow(reference: str, root: dict[str, Any]) -> Any:
        followed.append(reference)
        return find(reference, root)

    monkeypatch.setattr(schema_types, "referenced", follow)
    tree = {"anyOf": [STRING, *[{"$ref": "#/$defs/tree"}] * num_references]}
    schema = of({"$ref": "#/$defs/tree"}, **{"$defs": {"tree": tree}})
    assert schema_types.property_types(schema, "a") == schema_types.JSON_TYPES
    assert followed == ["#/$defs/tree"]


def test_a_reference_that_is_used_twice_keeps_its_type() -> None:
    twice = {"anyOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/s"}]}
    assert schema_types.property_types(of(twice, **{"$defs": {"s": STRING}}), "a") == {"string"}


def test_a_reference_into_another_document_allows_all_types() -> None:
    assert schema_types.schema_types({"$ref": "other.json"}, STRING) == schema_types.JSON_TYPES


def nested(levels: int, branches: int) -> dict[str, Any]:
    """Definitions `d0` to `d{levels}`: each is a choice between `branches` references to the next one."""
    choices = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * branches} for i in range(levels)}
    return {**choices, f"d{levels}": STRING}


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (of({"$ref": "#/$defs/d0"}, **{"$defs": nested(5, 8)}), "2,000 parts"),
        ({"$ref": "#/$defs/d0", "$defs": nested(5, 8)}, "2,000 parts"),
        (of({"$ref": "#/properties/a"}), "deeper than 16"),
        ({"$ref": "#"}, "deeper than 16"),
        (
            {
                "properties": {f"p{i}": {"$ref": "#/$defs/d", "title": f"{i}"} for i in range(200)},
                "$defs": {"d": {"allOf": [STRING] * 200}},
            },
            "20,000 parts",
        ),
        ({"properties": {f"p{i}": {"const": f"{i}" * 1000} for i in range(1200)}}, "1,048,576 characters"),
    ],
    ids=["choices", "objects", "a loop", "the whole is a loop", "many references", "a long grammar"],
)
def test_a_schema_that_is_small_and_means_much_is_refused(parser: str, schema: dict[str, Any], words: str) -> None:
    """Regression: a schema of 1.2 kB made a grammar of 3.2 MB."""
    assert words in refusal(parser, schema)


def test_references_that_make_a_deep_value_are_refused() -> None:
    chain = {f"d{i}": of({"$ref": f"#/$defs/d{i + 1}"}) for i in range(300)}
    assert "deeper than 64" in refusal("gemma4", of({"$ref": "#/$defs/d0"}, **{"$defs": {**chain, "d300": STRING}}))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        *(({"properties": wrong}, "'properties'") for wrong in (5, ["a"], "ab")),
        *(({"properties": {"a": STRING}, "required": wrong}, "'required'") for wrong in (True, 5, [1], [["a"]])),
        *(({key: wrong}, f"'{key}'") for key in ("anyOf", "oneOf", "allOf") for wrong in (5, {"a": 1})),
        ({"anyOf": [5]}, "has 5"),
        ({"$ref": 5}, "'$ref'"),
        ({"$ref": "#/$defs/b"}, "'$ref'"),
        ({"$ref": "other.json"}, "'$ref'"),
    ],
)
@pytest.mark.parametrize("parser", NOTATIONS)
def test_a_malformed_schema_is_refused(parser: str, schema: dict[str, Any], words: str) -> None:
    """Regression: most of these were errors of the server."""
    assert words in refusal(parser, schema)


@pytest.mark.parametrize(
    "value",
    [
        *({key: wrong} for key in ("anyOf", "oneOf", "allOf") for wrong in (5, {"a": 1})),
        *({"type": "string", "minLength": wrong} for wrong in ("x", -1, True)),
        *({"type": "string", "maxLength": wrong} for wrong in ("x", 1.5)),
        *({"type": "string", "pattern": wrong} for wrong in (5, [])),
        {"type": "string", "enum": 5},
        {"$ref": "#/$defs/b"},
    ],
)
@pytest.mark.parametrize("parser", TEXTS)
def test_a_malformed_value_is_refused(parser: str, value: dict[str, Any]) -> None:
    assert repr(list(value)[-1]) in refusal(parser, of(value))


@pytest.mark.parametrize("wrong", [{"minItems": "x"}, {"maxItems": -1}, {"properties": 7}])
def test_a_malformed_value_inside_a_value_is_refused(wrong: dict[str, Any]) -> None:
    kind = "object" if "properties" in wrong else "array"
    assert repr(next(iter(wrong))) in refusal("gemma4", of({"type": kind, **wrong}))


@pytest.mark.parametrize("properties", [5, ["a"], None])
def test_a_malformed_schema_that_nothing_holds_does_not_break_the_answer(properties: Any) -> None:
    tokenizer = WalkTokenizer(markers=())
    context = AnswerContext((ToolSpec("f", {"type": "object", "properties": properties}),), parses_tools=True)
    answer = tokenizer(b"<tool_call>\n<function=f>\n<parameter=a>\nls\n</parameter>\n</function>\n</tool_call>")
    parts = read_answer(answer_format("qwen3_coder").parser(tokenizer, context), with_texts(tokenizer, answer))
    assert json.loads(call_arguments(parts, 0)) == {"a": "ls"}
