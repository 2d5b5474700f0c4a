"""The fields that hold an answer's text to a form: each form of each API, one at a time, and which error names what is wrong."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from transom_cluster.openai.request.structured_output_fields import FIELDS, MAX_FORMAT_BYTES, read_answer_form
from transom_core.errors import RequestError
from transom_core.text.markup.context import (
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    LarkAnswer,
    MessageDemand,
    RegexAnswer,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


def form(**fields: Any) -> tuple[MessageDemand, str]:
    texts = {name: Raw(msgspec.json.encode(fields.get(name))) for name in FIELDS}
    return read_answer_form(texts, lambda _: None)


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


@pytest.mark.parametrize(
    ("name", "value", "demand"),
    [
        ("response_format", {"type": "text"}, FreeAnswer()),
        ("response_format", {"type": "json_object"}, JsonAnswer(None)),
        ("response_format", json_schema(schema=SCHEMA, strict=False, description="d"), JsonAnswer(SCHEMA)),
        ("response_format", json_schema(), JsonAnswer(None)),
        ("structured_outputs", {"json": SCHEMA}, JsonAnswer(SCHEMA)),
        ("structured_outputs", {"json": json.dumps(SCHEMA)}, JsonAnswer(SCHEMA)),
        ("structured_outputs", {"json_object": True}, JsonAnswer(None)),
        ("structured_outputs", {"regex": "a+", "disable_any_whitespace": False}, RegexAnswer("a+")),
        ("structured_outputs", {"choice": ["a", "b"], "json_object": False}, ChoiceAnswer(("a", "b"))),
        ("structured_outputs", {"grammar": "start: /a/"}, LarkAnswer("start: /a/")),
        ("guided_json", SCHEMA, JsonAnswer(SCHEMA)),
        ("guided_choice", ["a", "b"], ChoiceAnswer(("a", "b"))),
        ("guided_grammar", "start: /a/", LarkAnswer("start: /a/")),
    ],
)
def test_every_form(name: str, value: Any, demand: Any) -> None:
    assert form(**{name: value}) == (demand, "" if demand == FreeAnswer() else name)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
    ],
)
def test_structural_tags_are_the_same_grammar(fields: dict[str, Any]) -> None:
    assert form(**fields)[0] == form(structured_outputs={"structural_tag": TAG})[0]
    assert isinstance(form(**fields)[0], LarkAnswer)


def test_ebnf_becomes_lark() -> None:
    demand, _ = form(guided_grammar='root ::= "a" | "b"')
    assert isinstance(demand, LarkAnswer)
    assert "start:" in demand.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema", "object"),
        ({"response_format": json_schema(shema={})}, "response_format.json_schema.shema", "not a known field"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json, regex"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "1"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
            "not",
        ),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag", "triggers"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice", "1024"),
        ({"guided_regex": 5}, "guided_regex", "str"),
        ({"guided_regex": "a" * MAX_FORMAT_BYTES}, "guided_regex", f"{MAX_FORMAT_BYTES:,}"),
        ({"guided_grammar": "root ::= ["}, "guided_grammar", "EBNF"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
    ],
)
def test_a_wrong_form_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        form(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)
