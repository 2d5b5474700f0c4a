"""`tools` and `tool_choice`: what a request may say about functions, and which error names what is wrong."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from transom_cluster.openai.request.tool_fields import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    NO_PARAMETERS,
    read_tools,
    read_tools_demand,
    template_tools,
)
from transom_core.errors import RequestError
from transom_core.text.markup.context import ToolsDemand, ToolSpec

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


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
        ([tool(description="x" * MAX_TOOLS_BYTES)], "tools", f"{MAX_TOOLS_BYTES:,}"),
    ],
)
def test_a_wrong_tool_is_named(tools: Any, param: str, words: str) -> None:
    error = refused(read_tools, tools)
    assert error.param == param
    assert words in str(error)


def test_a_deep_schema_is_refused_before_it_is_walked() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    assert "nested deeper than 100" in str(refused(read_tools, [tool(parameters=deep)]))


@pytest.mark.parametrize(
    "given",
    [
        *("any", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": {}}, {"type": "custom"}),
        *({"type": "function", "name": "f"}, {"function": {"name": "f"}}, {**named("f"), "x": 1}, allowed("none", "f")),
    ],
    ids=str,
)
def test_another_choice_is_refused_with_what_is_allowed(given: Any) -> None:
    assert refused(demand_of, given).param == "tool_choice"


def test_an_allowed_tool_of_another_form_is_named() -> None:
    given = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f"), {"name": "g"}]}}
    assert refused(demand_of, given).param == "tool_choice.allowed_tools.tools[1]"


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


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ((), "required", "no tools"),
        ((), named("f"), "'f'"),
        (TOOLS, named("h"), "f, g"),
        (TOOLS, allowed("auto"), "allows no tool"),
    ],
)
def test_a_choice_that_the_tools_cannot_meet(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        demand_of(raw(choice), tools)
    assert caught.value.param == "tool_choice"
    assert words in str(caught.value)


def test_without_tools_nothing_is_demanded() -> None:
    for choice in (None, "none", "auto"):
        assert demand_of(raw(choice), ()) is None
