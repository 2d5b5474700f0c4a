"""OpenAI's official client, unchanged, with tools, reasoning and structured output: its parse and stream helpers included.

The worker speaks what the test gives it, so what a model would do is known.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamEvent

from tests.cluster.conftest import HttpServer
from tests.cluster.http.conftest import ANSWER, CALL, CITY, AskWeather, Weather, last_request, says

MESSAGES: Any = [{"role": "user", "content": "Is it raining in Paris?"}]
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]


def test_a_whole_answer(speaking_server: HttpServer, speaking_client: openai.OpenAI) -> None:
    says(speaking_server, ANSWER)
    answer = speaking_client.chat.completions.create(model="stub", messages=MESSAGES, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.model_extra == {"reasoning_content": "Rain?", "reasoning": "Rain?"}
    calls = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert calls == [("function", "weather", {"city": "Paris"}), ("function", "time", {"city": "Rome"})]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("\nRain?\n</think>") - 1


def test_the_stream_helper_puts_calls_together(speaking_server: HttpServer, speaking_client: openai.OpenAI) -> None:
    says(speaking_server, ANSWER)
    events: list[ChatCompletionStreamEvent[Any]] = []
    strict: Any = [
        openai.pydantic_function_tool(AskWeather, name="weather"),
        openai.pydantic_function_tool(AskWeather, name="time"),
    ]
    with speaking_client.chat.completions.stream(model="stub", messages=MESSAGES, tools=strict) as stream:
        events.extend(stream)
        completion = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.index, event.parsed_arguments) for event in done] == [
        ("weather", 0, AskWeather(city="Paris")),
        ("time", 1, AskWeather(city="Rome")),
    ]
    message = completion.choices[0].message
    assert message.content == "Let me look."
    assert [call.function.parsed_arguments for call in message.tool_calls or ()] == [
        AskWeather(city="Paris"),
        AskWeather(city="Rome"),
    ]
    assert last_request(speaking_server).grammar is not None  # the helper's tools are strict


def test_an_answer_goes_back_with_the_results_of_its_calls(
    speaking_server: HttpServer, speaking_client: openai.OpenAI
) -> None:
    says(speaking_server, CALL)
    message = speaking_client.chat.completions.create(model="stub", messages=MESSAGES, tools=TOOLS).choices[0].message
    assert message.tool_calls is not None
    says(speaking_server, "No rain.")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "0 mm"} for call in message.tool_calls]
    chat: Any = [*MESSAGES, message, *results]
    answer = speaking_client.chat.completions.create(model="stub", messages=chat, tools=TOOLS)
    assert answer.choices[0].message.content == "No rain."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
def test_a_demanded_call_ends_with_tool_calls(
    speaking_server: HttpServer, speaking_client: openai.OpenAI, choice: Any
) -> None:
    says(speaking_server, CALL)
    answer = speaking_client.chat.completions.create(model="stub", messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert last_request(speaking_server).grammar is not None


def test_parse_gives_the_model_its_pydantic_class(speaking_server: HttpServer, speaking_client: openai.OpenAI) -> None:
    says(speaking_server, '<think>Hm</think>{"city": "Paris", "rain_mm": 1.5}')
    answer = speaking_client.chat.completions.parse(model="stub", messages=MESSAGES, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Paris", rain_mm=1.5)
    assert last_request(speaking_server).grammar is not None
    with speaking_client.chat.completions.stream(model="stub", messages=MESSAGES, response_format=Weather) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Weather(city="Paris", rain_mm=1.5)


def test_parse_says_that_a_length_cut_the_json(speaking_server: HttpServer, speaking_client: openai.OpenAI) -> None:
    says(speaking_server, '{"city": "Paris", "rain_mm": 1.5}')
    with pytest.raises(openai.LengthFinishReasonError):
        speaking_client.chat.completions.parse(
            model="stub", messages=MESSAGES, response_format=Weather, max_completion_tokens=9
        )


def test_without_tools_their_markup_is_text(speaking_server: HttpServer, speaking_client: openai.OpenAI) -> None:
    says(speaking_server, CALL)
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = speaking_client.chat.completions.create(model="stub", messages=MESSAGES, **more)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
