"""Ids of calls in a chat's history, in the form that a family has learnt: a result keeps the id of its call."""

import re
from typing import Any

import pytest

from transom_cluster.openai.prompt.call_id_forms import with_learnt_call_ids


def call(call_id: str | None, name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "arguments": {}},
        **({} if call_id is None else {"id": call_id}),
    }


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [call("call_1", "f"), call("abcDEF123", "g")]},
    {"role": "tool", "tool_call_id": "abcDEF123", "content": "b"},
    {"role": "tool", "tool_call_id": "call_1", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [call("call_1", "h")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "c"},
]


def ids(chat: list[dict[str, Any]]) -> list[str]:
    found = [
        one
        for message in chat
        for one in [call["id"] for call in message.get("tool_calls", ())] + [message.get("tool_call_id")]
    ]
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
        {"role": "assistant", "content": "", "tool_calls": [call(None, "f")]},
    ]
    assert len(ids(with_learnt_call_ids(chat, parser))) == 2
    assert chat[0] == {"role": "tool", "content": "x"}  # the client's messages stay as they are
