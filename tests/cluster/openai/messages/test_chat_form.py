"""What /v1/messages makes of its fields: those of a chat."""

import json
from typing import Any

import msgspec
import pytest

from transom_cluster.openai.answer.opaque_reasoning import write_reasoning
from transom_cluster.openai.messages.chat_form import MessagesChat, messages_chat
from transom_cluster.openai.messages.request_body import MESSAGES_RULES, MessagesRequest
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.message_fields import template_messages

PARSER = BodyParser(MessagesRequest, MESSAGES_RULES)
USER: Any = {"role": "user", "content": "hi"}
MARK: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
NONCE = "x-anthropic-billing-header: cc_version=2; cch=0a1b2;"


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def convert(*, strips: bool = True, **body: Any) -> MessagesChat:
    parsed = PARSER.parse(json.dumps({"max_tokens": 9, "messages": [USER], **body}).encode())
    return messages_chat(parsed, strips_billing_header=strips)


def messages(*given: Any, **body: Any) -> list[dict[str, Any]]:
    """The messages as chat templates read them."""
    return template_messages(convert(messages=list(given) or [USER], **body).chat.messages)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("Be brief.", [system("Be brief.")]),
        ([text("Be", **MARK), text("brief.")], [system("Be\n\nbrief.") | {"cache_marks": (2,)}]),
        (f"{NONCE}\nBe brief.", [system("Be brief.")]),
        ([text(NONCE), text("Be brief.", **MARK)], [system("Be brief.") | {"cache_marks": (9,)}]),
        ([text(f" {NONCE}\n\nBe brief.\n{NONCE}")], [system(f"Be brief.\n{NONCE}")]),
        ([text("Be brief."), text(NONCE)], [system(f"Be brief.\n\n{NONCE}")]),
        ([text(NONCE)], []),
        ("", []),
        (None, []),
    ],
)
def test_the_system_prompt(given: Any, shown: list[Any]) -> None:
    assert messages(system=given) == [*shown, USER]
    kept = convert(system=given, strips=False).chat.messages
    assert not shown or NONCE not in str(given) or NONCE in str(kept[0].content)


def test_system_messages_inside_the_conversation_stay_where_they_are() -> None:
    assert messages(system([text(NONCE), text("A")]), USER, system("B")) == [system("A"), USER, system("B")]


def test_a_turn_of_the_assistant_is_one_message_and_results_are_messages_of_tools() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "of another server"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}, "caller": {"type": "direct"}, **MARK}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1", **MARK},
        {"type": "tool_result", "tool_use_id": "x", "content": [text("2"), text("3")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "y"},
    ]
    said = {"role": "assistant", "content": [thinking, text("Let "), text("me."), call]}
    reasoning = {"reasoning_content": "Hm.", "reasoning": "Hm."}
    added = {"type": "function", "id": "toolu_1", "function": {"name": "add", "arguments": {"a": 1}}}
    assert messages(USER, said, {"role": "user", "content": [*results, text("Go", **MARK), text("on.")]}, USER) == [
        USER,
        {"role": "assistant", "content": "Let me.", "tool_calls": [added], **reasoning, "cache_marks": (7,)},
        {"role": "tool", "content": "1", "tool_call_id": "toolu_1", "name": "add", "cache_marks": (1,)},
        {"role": "tool", "content": "Error: 2\n3", "tool_call_id": "x"},
        {"role": "tool", "content": "", "tool_call_id": "y"},
        {"role": "user", "content": "Go\non.\nhi", "cache_marks": (2,)},
    ]


@pytest.mark.parametrize(
    ("block", "reasoning", "num_warnings"),
    [
        ({"type": "thinking", "thinking": "", "signature": write_reasoning("Hm.")}, "Hm.", 0),
        ({"type": "redacted_thinking", "data": write_reasoning("Hm.")}, "Hm.", 0),
        ({"type": "redacted_thinking", "data": "RW1k"}, None, 1),
    ],
)
def test_hidden_thinking_in_the_history(block: Any, reasoning: str | None, num_warnings: int) -> None:
    form = convert(messages=[USER, {"role": "assistant", "content": [block, text("x")]}, USER])
    assert form.chat.messages[1].reasoning_content == reasoning
    assert len(form.warnings) == num_warnings


ON, OFF = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
IGNORED = {"service_tier": "auto", "metadata": {"user_id": "u"}, "inference_geo": "eu", "speed": "fast", **MARK}


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (IGNORED, {}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 4}, {"temperature": 0.5, "top_p": 0.9, "top_k": 4}),
        ({"stop_sequences": ["a"], "stop": "b"}, {"stop": ["a", "b"]}),
        ({"tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA, **MARK}]}, {"tools": [FUNCTION]}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "add"}},
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}, "chat_template_kwargs": {"x": 1}},
            {"reasoning_effort": "low", "chat_template_kwargs": {**ON, "x": 1}},
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"reasoning_effort": "max", "chat_template_kwargs": ON},
        ),
        ({"thinking": {"type": "disabled"}}, {"include_reasoning": False, "chat_template_kwargs": OFF}),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"response_format": FORM}),
    ],
)
def test_fields(body: dict[str, Any], fields: dict[str, Any]) -> None:
    chat = msgspec.json.decode(msgspec.json.encode(convert(**body).chat))
    given = {name: value for name, value in chat.items() if value not in (None, [], True)}
    for tool in given.get("tools", ()):
        assert tool["function"].pop("strict", None) is None
    assert given == {"max_tokens": 9, "messages": given["messages"], **fields}
