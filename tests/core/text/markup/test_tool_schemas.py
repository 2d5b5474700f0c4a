"""Tools' schemas in notations other than JSON: what they cost to read, which are refused, and what the others allow."""

import json
from typing import Any

import pytest

from tests.core.text.markup.canitoolcall_fixtures import call_arguments, read_answer
from tests.core.text.markup.grammar_walks import WalkTokenizer, compiled, with_texts
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


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"allOf": [of({"type": ["string", "null"]}), of({"type": ["string", "number"]})]}, {"string"}),
        ({"anyOf": [of(STRING), {"$ref": "#/$defs/n"}], "$defs": {"n": of({"type": "number"})}}, {"string", "number"}),
        ({"$ref": "#/$defs/s", "$defs": {"s": of(STRING)}}, {"string"}),
        ({"$ref": "#", "additionalProperties": STRING}, {"string"}),
        (of({"anyOf": [{"$ref": "#/$defs/s"}] * 2}, **{"$defs": {"s": STRING}}), {"string"}),
        (of({"$ref": "other.json"}), schema_types.JSON_TYPES),
    ],
)
def test_an_argument_has_its_type_from_all_parts_of_the_schema(schema: dict[str, Any], types: set[str]) -> None:
    """Regression: `5` was a number for a string that only a part of the schema names."""
    assert schema_types.property_types(schema, "a") == types


def nested(levels: int, branches: int) -> dict[str, Any]:
    """Definitions `d0` to `d{levels}`: each is a choice between `branches` references to the next one."""
    choices = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * branches} for i in range(levels)}
    return {**choices, f"d{levels}": STRING}


CHOICES = ("anyOf", "oneOf", "allOf")
CHAIN = {f"d{i}": of({"$ref": f"#/$defs/d{i + 1}"}) for i in range(300)}
WITH_TITLES = {f"p{i}": {"$ref": "#/$defs/d", "title": f"{i}"} for i in range(35)}
LARGE = [  # (schema, words of its refusal)
    (of({"$ref": "#/$defs/d0"}, **{"$defs": nested(5, 8)}), "2,000 parts"),
    ({"$ref": "#/$defs/d0", "$defs": nested(5, 8)}, "2,000 parts"),
    (of({"$ref": "#/properties/a"}), "deeper than 16"),
    ({"$ref": "#"}, "deeper than 16"),
    ({"properties": WITH_TITLES, "$defs": {"d": {"allOf": [STRING] * 800}}}, "50,000 keywords"),
    ({"properties": WITH_TITLES, "$defs": {"d": {"type": "integer", "enum": ["x"] * 5000 + [1]}}}, "50,000 keywords"),
    ({"allOf": [{"$ref": "#/$defs/d"}] * 25, "$defs": {"d": {"required": ["a"] * 5000}}}, "50,000 keywords"),
    (of({}, type="string"), "no object"),
    ({"properties": {f"p{i}": {"const": f"{i}" * 1000} for i in range(1200)}}, "1,048,576 characters"),
]
MALFORMED = [
    *(({"properties": wrong}, "'properties'") for wrong in (5, ["a"], "ab")),
    *(({"properties": {"a": STRING}, "required": wrong}, "'required'") for wrong in (True, 5, [1], [["a"]])),
    *(({key: wrong}, f"'{key}'") for key in CHOICES for wrong in (5, {"a": 1})),
    *(({"anyOf": [5]}, "has 5"), ({"$ref": 5}, "'$ref'"), ({"$ref": "#/$defs/b"}, "'$ref'")),
    *(({"$ref": "other.json"}, "'$ref'"), ({"allOf": [of(STRING), {"additionalProperties": False}]}, "requires 'a'")),
]
VALUES = [
    *(({key: wrong}, f"'{key}'") for key in CHOICES for wrong in (5, {"a": 1})),
    *(({"type": "string", "minLength": wrong}, "'minLength'") for wrong in ("x", -1, True)),
    *(({"type": "string", "maxLength": wrong}, "'maxLength'") for wrong in ("x", 1.5)),
    *(({"type": "string", "pattern": wrong}, "'pattern'") for wrong in (5, [])),
    *(({"type": "string", "enum": 5}, "'enum'"), ({"$ref": "#/$defs/b"}, "'$ref'")),
    ({"type": "string", "format": "binary"}, "'format' 'binary'"),
    ({"anyOf": [{"type": "string", "maxLength": 5}], "maxLength": 6}, "'maxLength'"),
    ({"type": "string", "enum": ["a"], "pattern": "b"}, "'pattern'"),
    *(({"type": "string", "const": 5}, "no value satisfies"), ({"allOf": [STRING, {"type": "integer"}]}, "no value")),
    ({"allOf": [{"prefixItems": [STRING]}, {"items": STRING}]}, "'prefixItems'"),
]
GEMMA_VALUES = [
    *(({"type": "array", "minItems": "x"}, "'minItems'"), ({"type": "array", "maxItems": -1}, "'maxItems'")),
    *(({"type": "object", "properties": 7}, "'properties'"), ({"type": "array", "items": [STRING]}, "'items'")),
]


@pytest.mark.parametrize(
    ("parser", "schema", "words"),
    [
        *((parser, *case) for parser in ("qwen3_coder", "gemma4") for case in LARGE),
        *((parser, *case) for parser in NOTATIONS for case in MALFORMED),
        *((parser, of(value), words) for parser in TEXTS for value, words in VALUES),
        *(("gemma4", of(value), words) for value, words in GEMMA_VALUES),
        ("gemma4", of({"$ref": "#/$defs/d0"}, **{"$defs": {**CHAIN, "d300": STRING}}), "deeper than 64"),
    ],
)
def test_what_is_malformed_or_large_or_cannot_be_held_is_refused(
    parser: str, schema: dict[str, Any], words: str
) -> None:
    """Regression: some were errors of the server or not held, and a schema of 1.2 kB made a grammar of 3.2 MB."""
    assert words in refusal(parser, schema)


@pytest.mark.parametrize("properties", [5, ["a"], None])
def test_a_malformed_schema_that_nothing_holds_does_not_break_the_answer(properties: Any) -> None:
    tokenizer = WalkTokenizer(markers=())
    context = AnswerContext((ToolSpec("f", {"type": "object", "properties": properties}),), parses_tools=True)
    answer = tokenizer(b"<tool_call>\n<function=f>\n<parameter=a>\nls\n</parameter>\n</function>\n</tool_call>")
    parts = read_answer(answer_format("qwen3_coder").parser(tokenizer, context), with_texts(tokenizer, answer))
    assert json.loads(call_arguments(parts, 0)) == {"a": "ls"}


QWEN3 = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">{}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
GEMMA = '<|tool_call>call:f{{a:<|"|>{}<|"|>}}<tool_call|>'


def allows(parser: str, schema: dict[str, Any], answer: str) -> bool:
    tokenizer = WalkTokenizer(markers=())
    tokens = tokenizer(answer.encode())
    matcher = compiled(tokenizer, grammar_of(parser, schema))
    return bool(matcher.validate_tokens(tokens) == len(tokens))


SIBLINGS = {
    "a length beside a choice": ({"anyOf": [STRING, {"type": "null"}], "maxLength": 2}, "ab", "abc"),
    "a length beside a reference": ({"$ref": "#/$defs/s", "maxLength": 2}, "ab", "abc"),
    "a type beside a choice": ({"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^x"}]}, "xyz", "abc"),
    "a list beside a choice": ({"enum": ["a", "b"], "anyOf": [{"const": "b"}, {"const": "c"}]}, "b", "a"),
    "all of two": ({"allOf": [{"$ref": "#/$defs/s"}, {"minLength": 2}]}, "ab", "a"),
    "two choices": ({"anyOf": [{"minLength": 2}], "oneOf": [{"type": "string", "maxLength": 3}]}, "ab", "a"),
    "a listed value of another type": ({"type": "string", "enum": ["a", 5]}, "a", "5"),
    "annotations": ({"title": "T", "default": "x", "examples": ["x"], "$ref": "#/$defs/s"}, "abc", None),
    "a format": ({"type": "string", "format": "date"}, "2026-12-01", "tomorrow"),
    "a format and a length": ({"type": "string", "format": "hostname", "maxLength": 4}, "a.bc", "a.bcd"),
}


@pytest.mark.parametrize("case", SIBLINGS)
@pytest.mark.parametrize(("parser", "answer"), [("qwen3_coder", QWEN3), ("gemma4", GEMMA), ("deepseek_v32", DSML)])
def test_keywords_beside_each_other_are_all_held(parser: str, answer: str, case: str) -> None:
    """Regression: `anyOf` and `$ref` hid the keywords beside them, and `format` was ignored."""
    value, good, bad = SIBLINGS[case]
    schema = of(value, **{"$defs": {"s": STRING}})
    assert allows(parser, schema, answer.format(good))
    assert bad is None or not allows(parser, schema, answer.format(bad))


SHORT = {"maxLength": 1}


@pytest.mark.parametrize(
    ("schema", "value", "is_allowed"),
    [
        ({"allOf": [of({"enum": ["x"]}), of(STRING)]}, "x", True),
        ({"allOf": [of({"enum": ["x"]}), of(STRING)]}, "abc", False),
        (of(STRING, anyOf=[{"properties": {"a": SHORT}}, {"properties": {"b": STRING}, "required": ["b"]}]), "x", True),
        (
            of(STRING, anyOf=[{"properties": {"a": SHORT}}, {"properties": {"b": STRING}, "required": ["b"]}]),
            "abc",
            False,
        ),
        ({"$ref": "#/$defs/s", "properties": {"a": SHORT}, "$defs": {"s": of(STRING)}}, "abc", False),
        ({"allOf": [of(STRING), {"additionalProperties": SHORT}]}, "x", True),
        ({"allOf": [of(STRING), {"additionalProperties": SHORT}]}, "abc", False),
    ],
)
@pytest.mark.parametrize(
    ("parser", "answer"),
    [("qwen3_coder", QWEN3), ("gemma4", GEMMA), ("pythonic", '[f(a="{}")]'), ("deepseek_v32", DSML)],
)
def test_a_property_satisfies_all_parts_that_name_it(
    parser: str, answer: str, schema: dict[str, Any], value: str, is_allowed: bool
) -> None:
    """Regression: the last part won."""
    assert allows(parser, schema, answer.format(value)) is is_allowed


SAMPLES = {
    "date": ("2026-02-29", "2026-13-01", "2026-04-31", "2026-12-1"),
    "time": ("23:59:60Z", "24:00:00Z", "12:00:00.5+01:00", "12:00", "12:00:00"),
    "date-time": ("2026-12-01T12:00:00Z", "2026-12-01 12:00:00Z", "2026-12-01"),
    "duration": ("P1Y2M3DT4H5M6S", "PT5M", "P3W", "P", "PT", "P1DT", "P1Y3D"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-42661417400", "x"),
    "email": ("a.b+c@d-e.org", "a@[1.2.3.4]", "a@", "a..b@c", "@c", "a b@c"),
    "hostname": ("a-b.example", "-a", "a-", "a..b", "a" * 63, "a" * 64),
    "ipv4": ("255.0.10.199", "256.0.0.1", "1.2.3", "01.2.3.4"),
    "ipv6": ("::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "1::8", "1:2:3:4:5:6:7", "1::2::3", "12345::"),
    "uri": (*("https://u:p@a.b:80/c/%20?d=/e#f", "mailto:a@b", "urn:x", "http://[::1]/"), "a", "http://a b", "x:%2"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_means_the_same_in_a_text_as_in_json(name: str) -> None:
    value = {"type": "string", "format": name}
    in_texts = [text for text in SAMPLES[name] if allows("qwen3_coder", of(value), QWEN3.format(text))]
    assert in_texts == [text for text in SAMPLES[name] if allows("pythonic", of(value), f"[f(a={json.dumps(text)})]")]
    assert 0 < len(in_texts) < len(SAMPLES[name])
