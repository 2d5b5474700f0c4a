"""Two workers with real engines hold answers to grammars; one dies in the middle, and clients get the bytes of a calm run.

A random model writes noise; what makes it write calls and JSON is the grammar, which the second worker rebuilds from the tokens
that the first one sent. test_answer_failover.py cuts scripted answers at every token; tests/end_to_end kills real processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.cluster.conftest import num_in_flight
from tests.cluster.router.mortal_workers import Mortal, routed
from tests.how_many import ALL_TESTS
from transom_cluster.http.api import build_api
from transom_cluster.openai.answer.chat_message import call_id
from transom_core.settings.settings import Settings
from transom_worker.replica import WorkerReplica

SHORT = {"type": "string", "maxLength": 12}
SCHEMA = {
    "type": "object",
    "properties": {"city": SHORT, "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "maxItems": 4}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": SCHEMA}}
    for name in ("weather", "time")
]
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90}
BODIES: dict[str, dict[str, Any]] = {
    "calls, greedy": {"tools": TOOLS, "tool_choice": "required", "temperature": 0.0, "logprobs": True},
    "calls, seeded": {"tools": TOOLS, "tool_choice": "required", "temperature": 0.9, "seed": 5, "stream": True},
    "one call": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "time"}},
        "seed": 6,
        "parallel_tool_calls": False,
    },
    "JSON, four choices": {"response_format": FORM, "temperature": 0.8, "seed": 7, "n": 4},
    "JSON, streamed": {"response_format": FORM, "temperature": 0.0, "stream": True},
    "a free answer with tools": {"tools": TOOLS[:1], "temperature": 1.0, "seed": 8, "stream": True, "max_tokens": 40},
}


@pytest.fixture(scope="module")
def replicas(tiny_model: Path) -> Iterator[list[WorkerReplica]]:
    values = {"model": str(tiny_model), "kv_cache_memory_bytes": "8MiB", "max_num_seqs": 16, "dtype": "float32"}
    made = [WorkerReplica(Settings.parse(**values).engine_config(), "tiny", f"w{i}") for i in range(2)]
    yield made
    for replica in made:
        replica.shutdown()


async def answers_of(
    model: Path, *workers: Mortal, bodies: Mapping[str, Mapping[str, Any]] = BODIES, **config: Any
) -> dict[str, Any]:
    """The answers to all bodies at once, without what is different in each run: ids, times and how a stream was cut."""
    async with routed(model, *workers, **config) as router:
        transport = httpx.ASGITransport(app=build_api(router))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as client:
            responses = await asyncio.gather(
                *(client.post("/v1/chat/completions", json={**CHAT, **body}) for body in bodies.values())
            )
        assert num_in_flight(router) == len(router.queue) == 0
    assert [response.status_code for response in responses] == [200] * len(bodies), [one.text for one in responses]
    return {
        name: joined_stream(response.text) if body.get("stream") else plain(response.json())
        for response, (name, body) in zip(responses, bodies.items(), strict=True)
    }


def plain(answer: dict[str, Any]) -> Any:
    """A whole answer; the ids of its calls are those that follow from its own. Log-probabilities may differ in their last bits."""
    for choice in answer["choices"]:
        check_ids(answer["id"], choice["index"], choice["message"].get("tool_calls", []))
        if choice["logprobs"]:
            choice["logprobs"] = [entry["token"] for entry in choice["logprobs"]["content"]]
    return answer["choices"], answer["usage"]["completion_tokens"]


def joined_stream(body: str) -> Any:
    """What a client puts together from the deltas of each choice."""
    lines = body.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    content: dict[int, str] = {}
    reasoning: dict[int, str] = {}
    calls: dict[int, list[dict[str, Any]]] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in reasons
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
        content[index] = content.get(index, "") + (choice["delta"].get("content") or "")
        reasoning[index] = reasoning.get(index, "") + choice["delta"].get("reasoning_content", "")
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                calls.setdefault(index, []).append({"id": piece["id"], **piece["function"]})
            else:
                calls[index][piece["index"]]["arguments"] += piece["function"]["arguments"]
    for index, own in calls.items():
        check_ids(chunks[0]["id"], index, own)
    return content, reasoning, calls, reasons


def check_ids(response_id: str, choice: int, calls: list[dict[str, Any]]) -> None:
    for index, call in enumerate(calls):
        assert call.pop("id") == call_id(response_id, choice, index)


@pytest.fixture(scope="module")
def calm(tiny_model: Path, replicas: list[WorkerReplica]) -> dict[str, Any]:
    return asyncio.run(answers_of(tiny_model, Mortal(replicas[0])))


def test_a_calm_run_calls_tools_and_writes_json(calm: Mapping[str, Any]) -> None:
    (choice,), _ = calm["calls, greedy"]
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} <= {"weather", "time"}
    (choice,), _ = calm["one call"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "time"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    choices, _ = calm["JSON, four choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("num_events", range(0, 110, 2) if ALL_TESTS else [0, 20, 90])
async def test_answers_are_those_of_a_calm_run(
    tiny_model: Path, replicas: list[WorkerReplica], calm: Mapping[str, Any], num_events: int
) -> None:
    dying, other = (Mortal(replica) for replica in replicas)
    dying.num_events = num_events
    answers = await answers_of(tiny_model, dying, other)
    assert dying.is_dead
    for name, answer in answers.items():
        assert answer == calm[name], name


REASONING_BODIES: dict[str, dict[str, Any]] = {
    "whole": {"seed": 3, "max_tokens": 30},
    "streamed": {"seed": 4, "max_tokens": 30, "stream": True},
    "before JSON": {"response_format": FORM, "temperature": 0.0, "max_tokens": 30, "stream": True},
}


async def test_reasoning_goes_on_where_it_was(tiny_model: Path, replicas: list[WorkerReplica]) -> None:
    """The noise never ends its reasoning, so the answers are nothing but that."""

    async def run(*workers: Mortal) -> dict[str, Any]:
        return await answers_of(tiny_model, *workers, bodies=REASONING_BODIES, reasoning_parser="deepseek_r1")

    calm = await run(Mortal(replicas[0]))
    (choice,), _ = calm["whole"]
    assert len(choice["message"]["reasoning_content"]) > 20
    assert choice["message"]["content"] == ""
    for num_events in range(0, 30, 2) if ALL_TESTS else (1, 20):
        dying, other = (Mortal(replica) for replica in replicas)
        dying.num_events = num_events
        assert await run(dying, other) == calm
        assert dying.is_dead
