"""Messages of chats with tools: what clients send back of an answer, as chat templates read it. Ids of calls in a chat's history,
in the form that a family has learnt: a result keeps the id of its call."""

import re
from typing import Any

import msgspec
import pytest

from transom_cluster.openai.prompt.call_id_forms import with_learnt_call_ids
from transom_cluster.openai.request.message_fields import ChatMessage, template_messages
from transom_core.errors import RequestError


def call(arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **fields}


def converted(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(msgspec.json.decode(msgspec.json.encode(messages), type=list[ChatMessage]))


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def test_calls_become_objects_and_results_get_their_functions_name() -> None:
    calls, result = converted(
        assistant(content=None, tool_calls=[call('{"city": "Köln", "days": [1]}')]),
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": text} for text in ("ra", "in")],
        },
    )
    function = {"name": "weather", "arguments": {"city": "Köln", "days": [1]}}
    assert calls == assistant(content=None, tool_calls=[{"id": "call_1", "type": "function", "function": function}])
    assert result == {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "rain"}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("{}", {}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"city": "K', '{"city": "K'),  # cut off at max_tokens, as this server itself would send it
        ("not JSON", "not JSON"),
    ],
)
def test_arguments_of_every_form(arguments: Any, read: Any) -> None:
    (message,) = converted(assistant(tool_calls=[call(arguments)]))
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_a_message_of_a_response_comes_back_unchanged() -> None:
    answer = assistant(content="Hi", **dict.fromkeys(("refusal", "annotations", "audio", "function_call")))
    delta = call(index=0)
    delta["function"]["parsed_arguments"] = {}
    answer |= {"reasoning_content": "Hm", "reasoning": "Hm", "parsed": {"a": 1}, "tool_calls": [delta]}
    (message,) = converted(answer)
    assert message["content"] == "Hi"
    assert message["reasoning_content"] == message["reasoning"] == "Hm"


def test_reasoning_has_the_names_that_templates_know() -> None:
    thought = {"reasoning_content": "Hm", "reasoning": "Hm", "thinking": "Hm"}
    assert converted(assistant(content="Hi", reasoning="Hm")) == [assistant(content="Hi", **thought)]
    (called,) = converted(assistant(content=None, reasoning_content="Hm", tool_calls=[call()]))
    assert called["thinking"] == "Hm"
    (both,) = converted(assistant(content="I look.", reasoning_content="Hm", tool_calls=[call()]))
    assert "thinking" not in both  # gpt-oss' template refuses it beside content


def test_results_need_not_belong_to_calls() -> None:
    rain, empty = {"role": "tool", "content": "rain"}, {"role": "tool", "tool_call_id": "z"}
    assert converted({"role": "user", "content": "x"}, rain, empty)[1:] == [rain, {**empty, "content": ""}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "critic", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "messages[0].tool_calls"),
        (assistant(content="x", tool_call_id="1"), "messages[0].tool_call_id"),
        (assistant(tool_calls=[call(), call(type="custom")]), "messages[0].tool_calls[1].type"),
        (assistant(tool_calls=[call([])]), "messages[0].tool_calls[0].function.arguments"),
        (assistant(tool_calls=[call('{"a":' * 200)]), "messages[0].tool_calls[0].function.arguments"),
        ({"role": "tool", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
    ],
)
def test_a_wrong_message_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        converted(message)
    assert caught.value.param == param


def chat_call(call_id: str | None, name: str) -> dict[str, Any]:
    own_id = {} if call_id is None else {"id": call_id}
    return {"type": "function", "function": {"name": name, "arguments": {}}, **own_id}


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [chat_call("call_1", "f"), chat_call("abcDEF123", "g")]},
    {"role": "tool", "tool_call_id": "abcDEF123", "content": "b"},
    {"role": "tool", "tool_call_id": "call_1", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [chat_call("call_1", "h")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "c"},
]


def ids(chat: list[dict[str, Any]]) -> list[str]:
    found = []
    for message in chat:
        found += [call["id"] for call in message.get("tool_calls", ())] + [message.get("tool_call_id")]
    return [one for one in found if one]


@pytest.mark.parametrize("parser", [None, "hermes", "openai"])
def test_most_families_keep_the_clients_ids(parser: str | None) -> None:
    assert with_learnt_call_ids(CHAT, parser) == CHAT


def test_mistral_has_nine_characters() -> None:
    first, second, *results = ids(with_learnt_call_ids(CHAT, "mistral"))
    assert second == "abcDEF123"
    assert re.fullmatch("[0-9a-f]{9}", first)
    assert results == [second, first, first, first]


def test_kimi_counts_all_calls_of_the_chat() -> None:
    expected = ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.h:2", "functions.h:2"]
    assert ids(with_learnt_call_ids(CHAT, "kimi_k2")) == expected


@pytest.mark.parametrize("parser", ["mistral", "kimi_k2"])
def test_what_has_no_id_or_no_call_gets_one(parser: str) -> None:
    chat: list[dict[str, Any]] = [
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [chat_call(None, "f")]},
    ]
    assert len(ids(with_learnt_call_ids(chat, parser))) == 2
    assert chat[0] == {"role": "tool", "content": "x"}  # the client's messages stay as they are
