"""`tools` and `tool_choice`: what a request may say about functions, and which error names what is wrong.

The fields that hold an answer's text to a form: each form of each API, one at a time, and which error names what is wrong.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from transom_cluster.openai.request.structured_output_fields import FIELDS, MAX_FORMAT_BYTES, read_answer_form
from transom_cluster.openai.request.tool_fields import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    NO_PARAMETERS,
    read_tools,
    read_tools_demand,
    template_tools,
)
from transom_core.errors import RequestError
from transom_core.text.markup.context import (
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    LarkAnswer,
    MessageDemand,
    RegexAnswer,
    ToolsDemand,
    ToolSpec,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DEEP = json.loads('{"a":' * 200 + "{}" + "}" * 200)
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


def raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def tool(name: Any = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


TOOLS = read_tools(raw([tool("f"), tool("g")]))


def demand_of(choice: Raw, tools: Sequence[ToolSpec] = TOOLS) -> ToolsDemand | None:
    return read_tools_demand(choice, tools, parallel=True)


def refused(read: Any, value: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(raw(value))
    return caught.value


def test_tools_are_read_and_rendered() -> None:
    tools = read_tools(raw([tool(description="d", parameters=CITY, strict=True), tool("now")]))
    assert tools == (
        ToolSpec(name="weather", description="d", parameters=CITY, strict=True),
        ToolSpec(name="now", parameters=NO_PARAMETERS),
    )
    assert template_tools(tools)[0] == tool(description="d", parameters=CITY)
    assert read_tools(raw(None)) == read_tools(raw([])) == ()


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ({"a": 1}, "tools", "array"),
        ([1], "tools[0]", "object"),
        ([tool(), {"type": "custom", "custom": {"name": "x"}}], "tools[1].type", "'custom'"),
        ([{"type": "function"}], "tools[0].function", "missing"),
        ([tool("a b")], "tools[0].function.name", "'a b'"),
        ([tool("a" * 129)], "tools[0].function.name", "1 to 128"),
        ([tool(), tool("b"), tool()], "tools[2].function.name", "tools[0].function.name"),
        ([tool(parameters=[])], "tools[0].function.parameters", "object"),
        ([tool(strict="yes")], "tools[0].function.strict", "bool"),
        ([tool(argument=1)], "tools[0].function.argument", "not a known field"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools", str(MAX_TOOLS)),
        ([tool(parameters=DEEP)], "tools", "nested deeper than 100"),  # before it is walked
        ([tool(description="x" * MAX_TOOLS_BYTES)], "tools", f"{MAX_TOOLS_BYTES:,}"),
    ],
)
def test_a_wrong_tool_is_named(tools: Any, param: str, words: str) -> None:
    error = refused(read_tools, tools)
    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize(
    ("choice", "parallel", "demand"),
    [
        (None, True, ToolsDemand("auto", ("f", "g"), parallel=True)),
        ("auto", True, ToolsDemand("auto", ("f", "g"), parallel=True)),
        ("none", True, None),
        ("required", False, ToolsDemand("required", ("f", "g"), parallel=False)),
        (named("g"), True, ToolsDemand("required", ("g",), parallel=False)),
        (allowed("auto", "g"), True, ToolsDemand("auto", ("g",), parallel=True)),
        (allowed("required", "g", "g"), True, ToolsDemand("required", ("g",), parallel=True)),
    ],
)
def test_what_an_answer_may_or_must_call(choice: Any, parallel: bool, demand: ToolsDemand | None) -> None:
    assert read_tools_demand(raw(choice), TOOLS, parallel=parallel) == demand


UNKNOWN_CHOICES = (
    *("any", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": {}}, {"type": "custom"}),
    *({"type": "function", "name": "f"}, {"function": {"name": "f"}}, {**named("f"), "x": 1}, allowed("none", "f")),
)


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        *((TOOLS, choice, "tool_choice") for choice in UNKNOWN_CHOICES),
        ((), "required", "no tools"),
        ((), named("f"), "'f'"),
        (TOOLS, named("h"), "f, g"),
        (TOOLS, allowed("auto"), "allows no tool"),
    ],
)
def test_a_choice_that_the_tools_cannot_meet(tools: Any, choice: Any, words: str) -> None:
    error = refused(partial(demand_of, tools=tools), choice)
    assert error.param == "tool_choice"
    assert words in str(error)
    given = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f"), {"name": "g"}]}}
    assert refused(demand_of, given).param == "tool_choice.allowed_tools.tools[1]"


def test_without_tools_nothing_is_demanded() -> None:
    for choice in (None, "none", "auto"):
        assert demand_of(raw(choice), ()) is None


def form(**fields: Any) -> tuple[MessageDemand, str]:
    return read_answer_form({name: raw(fields.get(name)) for name in FIELDS}, lambda _: None)


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
