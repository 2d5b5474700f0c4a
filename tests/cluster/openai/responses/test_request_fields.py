"""What /v1/responses makes of its input: messages of a chat, and errors that name items.

Its tools as those of a chat, and the text of a custom tool's call, from JSON that comes in pieces.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import Raw

from tests.how_many import num_examples
from transom_cluster.openai.answer.opaque_reasoning import read_reasoning, write_reasoning
from transom_cluster.openai.responses.custom_input import CustomInput
from transom_cluster.openai.responses.input_items import _Chat, read_messages
from transom_cluster.openai.responses.responses_tools import ToolName, ToolNames, read_tool_choice, read_tools
from transom_core.errors import RequestError

USER = {"role": "user", "content": "hi"}
ADD = {"type": "function", "name": "add", "description": "Adds.", "strict": True, "parameters": {"type": "object"}}


def raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


def read(value: Any, *, instructions: str | None = None, warnings: list[str] | None = None) -> list[dict[str, Any]]:
    return read_messages(raw(value), instructions=instructions, warnings=[] if warnings is None else warnings)


def call(call_id: str, name: str = "add", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def chat_call(call_id: str, name: str = "add", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_messages_have_any_form_of_text():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    envelope = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": "final_answer"}
    said = {"type": "output_text", "text": "c", "annotations": [], "logprobs": []}
    spoken = {**envelope, "content": [said, {"type": "refusal", "refusal": "no"}]}
    assert read([{"type": "message", "role": "user", "content": parts}, spoken, USER]) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cno"},
        USER,
    ]


def test_instructions_and_developer_messages_at_the_beginning_are_one_system_message():
    developer = {"role": "developer", "content": "B"}
    assert read([developer, {"role": "system", "content": "C"}, USER, developer], instructions="A") == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        USER,
        {"role": "system", "content": "B"},
    ]


def test_a_turn_of_the_model_is_one_message():
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    spoken = {"role": "assistant", "content": "Let me see."}
    outputs = [
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
    ]
    assert read([USER, reasoning, spoken, call("a"), call("b", "sub"), *outputs, spoken]) == [
        USER,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [chat_call("a"), chat_call("b", "sub")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "Let me see."},
    ]


def test_custom_tools_and_namespaces():
    items = [
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": 'x"y'},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        call("b", "close", namespace="agents"),
    ]
    assert read(items) == [
        {"role": "assistant", "tool_calls": [chat_call("a", "patch", '{"input":"x\\"y"}')]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "assistant", "tool_calls": [chat_call("b", "agents__close")]},
    ]


def test_reasoning_comes_back_from_encrypted_content():
    warnings: list[str] = []
    own = {"type": "reasoning", "summary": [], "encrypted_content": write_reasoning("Hm. \u00fc")}
    other = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}
    assert (read([own, call("a")], warnings=warnings)[0]["reasoning_content"], warnings) == ("Hm. \u00fc", [])
    assert "reasoning_content" not in read([other, call("a")], warnings=warnings)[0]
    assert warnings == ["input[0]: encrypted_content of another server is skipped"]


@pytest.mark.parametrize("text", ["transom.1.", "transom.1.*", "transom.1.gA==", "transom.2.QQ=="])
def test_a_broken_encrypted_content_is_no_error(text):
    assert read_reasoning(text) in (None, "")


def test_items_of_hosted_tools_are_skipped_with_a_warning():
    warnings: list[str] = []
    assert read([{"type": "web_search_call", "id": "ws", "status": "completed"}, USER], warnings=warnings) == [USER]
    assert warnings == ["input[0]: items of type web_search_call are skipped"]


IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}


def test_texts_are_joined_once_at_the_end():
    """4,096 items of 2 KB copied 16 GB when each one copied what was joined before."""
    texts = [f"text {i}" for i in range(5)]
    chat = _Chat([])
    for text in texts:
        chat.add_system(text)
    assert all(kept is text for kept, text in zip(chat.messages[0]["content"], texts, strict=True))
    assert chat.joined() == [{"role": "system", "content": "\n\n".join(texts)}]
    reasoning = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in texts]
    assert read(reasoning) == [{"role": "assistant", "reasoning_content": "".join(texts)}]


def read_given_tools(*tools: Any, names: ToolNames | None = None, warnings: list[str] | None = None) -> Any:
    found = read_tools(raw(tools), names=names or ToolNames(), warnings=[] if warnings is None else warnings)
    return [
        {**tool, "function": {**tool["function"], "parameters": decoded(tool["function"]["parameters"])}}
        for tool in found.values()
    ]


def decoded(value: Any) -> Any:
    return json.loads(bytes(value)) if isinstance(value, Raw) else value


def test_functions():
    function = {"name": "add", "description": "Adds.", "strict": True, "parameters": {"type": "object"}}
    assert read_given_tools(ADD) == [{"type": "function", "function": function}]
    assert read_tools(raw(None), names=ToolNames(), warnings=[]) == {}


def test_custom_tools_take_one_text():
    names = ToolNames()
    pattern = {"type": "grammar", "syntax": "regex", "definition": "a+|b"}
    (tool,) = read_given_tools({"type": "custom", "name": "patch", "format": pattern}, names=names)
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
    (tool,) = read_given_tools({"type": "custom", "name": "patch", "format": grammar}, warnings=warnings)
    assert 'start: "a"' in tool["function"]["description"]
    assert warnings == ["tools[0]: its grammar is shown to the model and not enforced"]


def test_namespaces():
    names = ToolNames()
    agents = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [ADD]}
    assert [tool["function"]["name"] for tool in read_given_tools(agents, ADD, names=names)] == ["agents__add", "add"]
    assert names.of_call("agents__add") == ToolName(name="add", namespace="agents")
    assert names.of_call("unknown") == ToolName(name="unknown")


def test_other_tools_are_skipped_with_a_warning():
    warnings: list[str] = []
    assert len(read_given_tools({"type": "web_search"}, ADD, {"type": "future"}, warnings=warnings)) == 1
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


def read_as_tools(value: Any) -> None:
    read_given_tools(*value)


def read_as_choice(value: Any) -> None:
    read_tool_choice(raw(value))


@pytest.mark.parametrize(
    ("read_as", "value", "param"),
    [
        (read, None, "input"),
        (read, {}, "input"),
        (read, [3], "input[0]"),
        (read, [{"type": "message", "role": "user"}], "input[0].content"),
        (read, [USER, {"role": "tool", "content": "a"}], "input[1].role"),
        (read, [USER, {"role": "user", "content": [IMAGE]}], "input[1].content[0]"),
        (read, [{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0]"),
        (read, [{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        (read, [{"type": "dance"}], "input[0].type"),
        (read, [{"type": "function_call", "call_id": "a", "name": "b"}], "input[0].arguments"),
        (read, [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}], "input[0].output[0]"),
        (read, [{"type": "web_search_call"}], "input"),
        (read_as_tools, [3], "tools[0]"),
        (read_as_tools, [{}], "tools[0].type"),
        (read_as_tools, [{"type": "function"}], "tools[0].name"),
        (read_as_tools, [ADD, ADD], "tools[1]"),
        (
            read_as_tools,
            [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}],
            "tools[0].tools[0].name",
        ),
        (read_as_tools, [ADD] * 1025, "tools"),
        (read_as_choice, 3, "tool_choice"),
        (read_as_choice, {"type": "web_search"}, "tool_choice.type"),
        (read_as_choice, {"type": "function"}, "tool_choice.name"),
        (read_as_choice, {"type": "allowed_tools", "tools": [{"type": "mcp"}]}, "tool_choice.tools[0].type"),
    ],
)
def test_errors_name_what_is_wrong(read_as, value, param):
    with pytest.raises(RequestError) as raised:
        read_as(value)
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
