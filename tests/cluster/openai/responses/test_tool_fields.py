"""The tools of /v1/responses as those of a chat, and the text of a custom tool's call, from JSON that comes in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from tests.how_many import num_examples
from transom_cluster.openai.responses.custom_input import CustomInput
from transom_cluster.openai.responses.responses_tools import ToolName, ToolNames, read_tool_choice, read_tools
from transom_core.errors import RequestError

ADD = {"type": "function", "name": "add", "description": "Adds.", "strict": True, "parameters": {"type": "object"}}


def raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


def read(*tools: Any, names: ToolNames | None = None, warnings: list[str] | None = None) -> Any:
    read = read_tools(raw(tools), names=names or ToolNames(), warnings=[] if warnings is None else warnings)
    return [
        {**tool, "function": {**tool["function"], "parameters": decoded(tool["function"]["parameters"])}}
        for tool in read.values()
    ]


def decoded(value: Any) -> Any:
    return json.loads(bytes(value)) if isinstance(value, Raw) else value


def test_functions():
    function = {"name": "add", "description": "Adds.", "strict": True, "parameters": {"type": "object"}}
    assert read(ADD) == [{"type": "function", "function": function}]
    assert read_tools(raw(None), names=ToolNames(), warnings=[]) == {}


def test_custom_tools_take_one_text():
    names = ToolNames()
    (tool,) = read(
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+|b"}},
        names=names,
    )
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": "^(a+|b)$"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    assert tool["function"]["strict"] is True
    assert names.of_call("patch") == ToolName(name="patch", kind="custom")


def test_a_lark_grammar_is_shown_and_not_enforced():
    warnings: list[str] = []
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    (tool,) = read({"type": "custom", "name": "patch", "format": grammar}, warnings=warnings)
    assert 'start: "a"' in tool["function"]["description"]
    assert warnings == ["tools[0]: its grammar is shown to the model and not enforced"]


def test_namespaces():
    names = ToolNames()
    agents = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [ADD]}
    assert [tool["function"]["name"] for tool in read(agents, ADD, names=names)] == ["agents__add", "add"]
    assert names.of_call("agents__add") == ToolName(name="add", namespace="agents")
    assert names.of_call("unknown") == ToolName(name="unknown")


def test_other_tools_are_skipped_with_a_warning():
    warnings: list[str] = []
    assert len(read({"type": "web_search"}, ADD, {"type": "future"}, warnings=warnings)) == 1
    assert warnings == ["tools[0]: tools of type web_search are skipped", "tools[2]: tools of type future are skipped"]


@pytest.mark.parametrize(
    ("given", "chat"),
    [
        (None, None),
        ("auto", "auto"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
        ),
    ],
)
def test_tool_choice(given, chat):
    assert read_tool_choice(raw(given)) == chat


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([3], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([ADD, ADD], "tools[1]"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([ADD] * 1025, "tools"),
    ],
)
def test_errors_name_the_tool(tools, param):
    with pytest.raises(RequestError) as raised:
        read(*tools)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (3, "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "allowed_tools", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0].type"),
    ],
)
def test_errors_name_the_choice(choice, param):
    with pytest.raises(RequestError) as raised:
        read_tool_choice(raw(choice))
    assert raised.value.param == param


@given(text=st.text(), is_ascii=st.booleans(), data=st.data())
@settings(max_examples=num_examples(80, 5000), deadline=None)
def test_any_split_gives_the_text(text, is_ascii, data):
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)))))
    reader = CustomInput()
    pieces = [reader.push(arguments[a:b]) for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    assert "".join(pieces) + reader.end() == reader.text == text


@pytest.mark.parametrize("arguments", ["", "{}", "ls -l", '{"cmd": "ls"}', '{"input": 1}'])
def test_other_arguments_are_given_as_they_are(arguments):
    reader = CustomInput()
    assert reader.push(arguments) + reader.end() == reader.text == arguments


def test_a_text_that_is_cut_keeps_what_came():
    reader = CustomInput()
    assert reader.push('{"input": "ls \\') + reader.end() == "ls \\"
