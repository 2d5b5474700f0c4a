"""The whole path over HTTP with a real engine: a random model's noise is held to tools and forms, whole and streamed.

The model has noise for weights, so all that is right in an answer comes from the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.cluster.engine_server import engine_server
from tests.cluster.http.test_http_errors import problem

CLIENT_S = 120
TEXT = {"type": "string", "maxLength": 8}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": TEXT, "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "maxItems": 2}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("weather", "time")
]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": "hi"}]
SAMPLED: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "seed": 3}


@pytest.fixture(scope="module")
def url(tiny_model) -> Iterator[str]:
    with engine_server(tiny_model, kv_cache_memory_bytes="16MiB", max_num_seqs=8) as running:
        yield running.url
        assert running.replica.engine.grammars.num_failed
        lines = running.router.metrics.text().splitlines()
        assert all(line.endswith(" 0.0") for line in lines if line.startswith("transom_router_failovers_total{"))


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CLIENT_S, max_retries=0) as made:
        yield made


def valid(text: str | None) -> Any:
    assert text is not None
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    return value


def streamed(
    client: openai.OpenAI, **body: Any
) -> tuple[dict[int, str], dict[int, dict[int, dict[str, str]]], set[Any]]:
    """What a client puts together of a stream: text by choice, calls by choice and index, and finish reasons."""
    texts: dict[int, str] = {}
    calls: dict[int, dict[int, dict[str, str]]] = {}
    reasons = set()
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **SAMPLED, **body):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                own = calls.setdefault(choice.index, {})
                if piece.index not in own:
                    assert piece.type == "function"
                    assert piece.id
                    assert piece.function.name
                    own[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
                own[piece.index]["arguments"] += piece.function.arguments or ""
            reasons.add(choice.finish_reason)
    return texts, calls, reasons - {None}


def test_a_named_call_whole_and_streamed(client):
    choice = {"type": "function", "function": {"name": "time"}}
    answer = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, tool_choice=choice, n=2, **SAMPLED)
    for one in answer.choices:
        (call,) = one.message.tool_calls
        assert (one.finish_reason, one.message.content, call.function.name) == ("tool_calls", None, "time")
        valid(call.function.arguments)
    texts, calls, reasons = streamed(client, tools=TOOLS, tool_choice=choice, n=2)
    assert (texts, reasons) == ({0: "", 1: ""}, {"tool_calls"})
    whole = [one.message.tool_calls[0].function.arguments for one in answer.choices]
    assert [calls[index][0]["arguments"] for index in (0, 1)] == whole


def test_required_calls_go_on_with_their_results(client):
    answer = client.chat.completions.create(
        messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SAMPLED
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name in ("weather", "time")
    valid(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    following = client.chat.completions.create(
        messages=[*MESSAGES, message, result], tools=TOOLS, tool_choice="none", response_format=FORM, **SAMPLED
    )
    assert following.choices[0].message.tool_calls is None
    valid(following.choices[0].message.content)


def test_json_whole_and_streamed(client):
    answer = client.chat.completions.create(messages=MESSAGES, response_format=FORM, n=3, **SAMPLED)
    assert {one.finish_reason for one in answer.choices} == {"stop"}
    for one in answer.choices:
        valid(one.message.content)
    texts, _, _ = streamed(client, response_format=FORM, n=3)
    assert texts == {one.index: one.message.content for one in answer.choices}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", ""),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "number", "not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_and_named(url, fields, param, words):
    body = {"messages": MESSAGES, "max_tokens": 8, **fields}
    error = problem(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=CLIENT_S), 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_grammar_that_fails_at_a_token_is_the_requests_fault(url, is_stream):
    """A schema of 3,000 optional properties fails at the first one that is written. No worker was lost: no 503, no second try."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(3000)}, "required": ["p2999"]}
    form = {"type": "json_schema", "json_schema": {"name": "wide", "strict": True, "schema": schema}}
    body = {"messages": MESSAGES, "response_format": form, "stream": is_stream, "max_tokens": 50}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=CLIENT_S)
    error = problem(response, 400)
    assert "too complex after" in error["message"]
    assert error["type"] == "invalid_request_error"
