"""OpenAI's official client, unchanged, at /v1/responses: reasoning, calls, parsed answers, streamed and whole.

The worker speaks what the test gives it, so what a model would do is known.
"""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.cluster.conftest import HttpServer
from tests.cluster.http.speaking_server import ANSWER, CALL, AskWeather, Weather, last_request, says
from tests.cluster.openai.published_document import check_event, check_published

INPUT = "Is it raining in Paris?"
TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    for name in ("weather", "time")
]


def test_a_whole_answer(speaking_server: HttpServer, speaking_client: Any) -> None:
    says(speaking_server, ANSWER)
    answer = speaking_client.responses.create(model="stub", input=INPUT, tools=TOOLS)
    check_published("Response", answer.to_dict())
    reasoning, message, *calls = answer.output
    assert reasoning.content[0].text == "Rain?"
    assert message.content[0].text == "Let me look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Paris"}),
        ("time", {"city": "Rome"}),
    ]
    assert (answer.status, answer.output_text) == ("completed", "Let me look.")
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("\nRain?\n</think>") - 1


def test_a_streamed_answer_is_the_whole_one(speaking_server: HttpServer, speaking_client: Any) -> None:
    says(speaking_server, ANSWER)
    with speaking_client.responses.stream(model="stub", input=INPUT, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    for event in speaking_client.responses.create(model="stub", input=INPUT, tools=TOOLS, stream=True):
        check_event(event.to_dict())
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    assert list(deltas) == [item.id for item in final.output]
    assert list(deltas.values())[:2] == ["Rain?", "Let me look."]
    assert [json.loads(text) for text in list(deltas.values())[2:]] == [{"city": "Paris"}, {"city": "Rome"}]


def test_parsed_answers_and_calls(speaking_server: HttpServer, speaking_client: Any) -> None:
    says(speaking_server, '{"city": "Paris", "rain_mm": 2.5}')
    parsed = speaking_client.responses.parse(model="stub", input=INPUT, text_format=Weather)
    assert parsed.output_parsed == Weather(city="Paris", rain_mm=2.5)
    assert last_request(speaking_server).grammar is not None
    says(speaking_server, CALL)
    tool: Any = openai.pydantic_function_tool(AskWeather, name="weather")
    called = speaking_client.responses.parse(model="stub", input=INPUT, tools=[tool])
    assert called.output[0].parsed_arguments == AskWeather(city="Paris")


def test_the_output_sent_back_with_a_result_continues_the_chat(
    speaking_server: HttpServer, speaking_client: Any
) -> None:
    says(speaking_server, ANSWER)
    first = speaking_client.responses.create(model="stub", input=INPUT, tools=TOOLS)
    ids = [item.call_id for item in first.output if item.type == "function_call"]
    assert len(set(ids)) == 2
    says(speaking_server, "Yes.")
    second = speaking_client.responses.create(
        model="stub",
        tools=TOOLS,
        input=[
            {"role": "user", "content": INPUT},
            *first.output,
            *({"type": "function_call_output", "call_id": one, "output": "2 mm"} for one in ids),
        ],
    )
    assert second.output_text == "Yes."
