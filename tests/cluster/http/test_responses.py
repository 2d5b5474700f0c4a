"""POST /v1/responses over a real socket, with OpenAI's official client and without."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import HttpServer, sent_events
from tests.cluster.http.conftest import ANSWER, CALL, CITY, AskWeather, Weather, last_request, says
from tests.cluster.openai.published_document import check_event, check_published
from transom_core.contract import ErrorInfo
from transom_core.errors import StepFailed

ASKED: dict[str, Any] = {"model": "stub", "input": "hi"}
PROMPT = "user:hi;assistant:"
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}

CITY_TOOLS: Any = [
    {"type": "function", "name": name, "strict": True, "parameters": CITY} for name in ("weather", "time")
]


def post(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"input": "hi", **body}, timeout=120)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = sent_events(response.text)
    for event in events:
        check_event(event)
    return events


def test_a_response(client):
    answer = client.responses.create(**ASKED, max_output_tokens=4)
    assert answer.id.startswith("resp_")
    assert answer.output_text == "abcd"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 4)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.store is False
    assert answer.output[0].role == "assistant"


def test_sampling_reaches_the_worker(server):
    post(server, max_output_tokens=2, temperature=0.5, top_p=0.25, seed=7, stop="z", cache_salt="s", priority=0)
    request = server.worker.submitted[-1]
    assert (request.params.temperature, request.params.top_p, request.seed) == (0.5, 0.25, 7)
    assert (request.params.stop, request.cache_salt) == (("z",), "s")
    assert request.params.max_tokens == 2


def test_what_codex_sends_is_taken(server):
    answer = post(
        server,
        model="stub",
        instructions="You are a coding agent.",
        tools=[TOOL, {"type": "web_search", "external_web_access": True}],
        tool_choice="none",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="01a2042c",
        client_metadata={"thread_id": "01a2042c"},
        text={"verbosity": "low"},
        max_output_tokens=2,
        service_tier="auto",
    )
    assert answer.status_code == 200
    assert answer.headers["x-transom-warning"] == "tools[1]: tools of type web_search are skipped"
    check_published("Response", answer.json())
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function", "web_search"]


def test_a_warning_is_one_line_of_ascii(server):
    answer = post(server, tools=[{"type": "a\r\nx: \u00fc\u2028"}], max_output_tokens=1)
    assert answer.status_code == 200
    assert answer.headers["x-transom-warning"] == "tools[0]: tools of type a??x: ?? are skipped"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["all"]}, "include[0]"),
        ({"stream_options": {}}, "stream_options"),
        ({"input": "x" * 600}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "input"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"n": 2}, "n"),
        (
            {"tools": [{"type": "web_search"}, {"type": "function", "name": "a", "parameters": 3}]},
            "tools[1].parameters",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
    ],
)
def test_errors_name_the_field(server, body, param):
    answer = post(server, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_error_in_mid_stream_is_an_event(server):
    server.worker.step_error = ErrorInfo.of(StepFailed("secret"))
    try:
        events = events_of(post(server, stream=True))
    finally:
        server.worker.step_error = None
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(events)


def test_an_answer_with_reasoning_and_calls_is_sent_back_with_results(
    speaking_server: HttpServer, speaking_client: Any
) -> None:
    says(speaking_server, ANSWER)
    answer = speaking_client.responses.create(model="stub", input=ASKED["input"], tools=CITY_TOOLS)
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
    assert len({call.call_id for call in calls}) == 2
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2 mm"} for call in calls]
    says(speaking_server, "Yes.")
    chat = [{"role": "user", "content": ASKED["input"]}, *answer.output, *results]
    assert speaking_client.responses.create(model="stub", tools=CITY_TOOLS, input=chat).output_text == "Yes."


def test_parsed_answers_and_calls(speaking_server: HttpServer, speaking_client: Any) -> None:
    says(speaking_server, '{"city": "Paris", "rain_mm": 2.5}')
    parsed = speaking_client.responses.parse(model="stub", input=ASKED["input"], text_format=Weather)
    assert parsed.output_parsed == Weather(city="Paris", rain_mm=2.5)
    assert last_request(speaking_server).grammar is not None
    assert last_request(speaking_server).grammar_bytes == 1 << 20  # as the check has measured
    says(speaking_server, CALL)
    tool: Any = openai.pydantic_function_tool(AskWeather, name="weather")
    called = speaking_client.responses.parse(model="stub", input=ASKED["input"], tools=[tool])
    assert called.output[0].parsed_arguments == AskWeather(city="Paris")
