"""POST /v1/messages with its count_tokens, and /v1/responses, over a real socket, with the official clients and without."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import HttpServer, http_server, sent_events
from tests.cluster.http.conftest import ANSWER, CALL, CITY, AskWeather, Weather, last_request, says
from tests.cluster.openai.published_document import ANTHROPIC, check_published
from tests.cluster.stub_worker import MAX_MODEL_LEN
from transom_cluster.openai.answer.opaque_reasoning import read_reasoning
from transom_core.contract import ErrorInfo
from transom_core.errors import Overloaded, StepFailed

USER: Any = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": "stub", "max_tokens": 4, "messages": [USER]}
PROMPT = "user:hi;assistant:"
KEY = "sesame"
CITY_TOOLS: Any = [{"name": name, "input_schema": CITY} for name in ("weather", "time")]
TALK: dict[str, Any] = {**ASKED, "max_tokens": 2000, "tools": CITY_TOOLS}
ASKED_RESPONSE: dict[str, Any] = {"model": "stub", "input": "hi"}
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}

CITY_FUNCTION = {"type": "function", "strict": True, "parameters": CITY}
RESPONSE_TOOLS: Any = [{**CITY_FUNCTION, "name": name} for name in ("weather", "time")]


def official_client(server: HttpServer, api_key: str = KEY) -> Any:
    import anthropic  # a second of every process that collects tests

    return anthropic.Anthropic(base_url=server.url, api_key=api_key, max_retries=0, timeout=120)


def post(server: HttpServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/messages", json={**ASKED, **body}, headers={"x-api-key": KEY}, timeout=120)


def plain(message: Any) -> list[dict[str, Any]]:
    """The content without the ids of calls, which differ in each answer."""
    return [{name: value for name, value in one.to_dict().items() if name != "id"} for one in message.content]


def both(client: Any, **body: Any) -> Any:
    """The whole answer, which is also the one that its stream makes."""
    whole: Any = client.messages.create(**{**TALK, **body})
    check_published("Message", whole.to_dict(exclude_unset=False), ANTHROPIC)
    with client.messages.stream(**{**TALK, **body}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert plain(streamed) == plain(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage == whole.usage
    return whole


@pytest.fixture(scope="module")
def guarded() -> Iterator[HttpServer]:
    with http_server(api_keys=(KEY,), model_aliases=("second",), serve_claude_names=True) as running:
        yield running


@pytest.fixture(scope="module")
def claude(guarded: HttpServer) -> Iterator[Any]:
    with official_client(guarded) as made:
        yield made


@pytest.fixture(scope="module")
def speaker(speaking_server: HttpServer) -> Iterator[Any]:
    with official_client(speaking_server) as made:
        yield made


def test_a_message(claude: Any) -> None:
    answer = both(claude, max_tokens=4, tools=[])
    assert answer.id.startswith("msg_")
    assert answer.id == answer._request_id
    assert plain(answer) == [{"type": "text", "text": "abcd", "citations": None}]
    assert (answer.model, answer.stop_reason) == ("stub", "max_tokens")
    usage = answer.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 13)  # of one whole block of 16
    assert (usage.input_tokens, usage.output_tokens) == (len(PROMPT) - 16, 4)


def test_max_tokens_of_0_fill_the_cache_alone_and_too_many_end_at_the_models_length(guarded, claude) -> None:
    empty = claude.messages.create(**{**ASKED, "max_tokens": 0})
    assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "max_tokens", 0)
    claude.messages.create(**{**ASKED, "max_tokens": 2 * MAX_MODEL_LEN})
    assert last_request(guarded).params.max_tokens is None


@pytest.mark.parametrize("name", ["second", "claude-opus-4"])
def test_other_names_of_the_model(guarded: HttpServer, claude: Any, name: str) -> None:
    import anthropic

    assert claude.messages.create(**{**ASKED, "model": name}).model == name
    listed = httpx.get(f"{guarded.url}/v1/models", headers={"authorization": f"Bearer {KEY}", "x-api-key": "wrong"})
    assert [(one["id"], one["root"]) for one in listed.json()["data"]] == [("stub", "stub"), ("second", "stub")]
    with pytest.raises(anthropic.NotFoundError):  # answers and logs repeat the name
        claude.messages.create(**{**ASKED, "model": "claude-" + "x" * 94})


def test_errors_have_the_clients_classes(guarded: HttpServer, claude: Any) -> None:
    import anthropic

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (anthropic.NotFoundError, {"model": "other"}, "not_found_error"),
        (anthropic.BadRequestError, {"max_tokens": -1}, "invalid_request_error"),
        (anthropic.BadRequestError, {"messages": [{**USER, "content": "x" * 600}]}, "invalid_request_error"),
    ]
    for kind, wrong, error_type in cases:
        with pytest.raises(kind) as caught:
            claude.messages.create(**{**ASKED, **wrong})
        assert caught.value.type == error_type
        check_published("ErrorResponse", caught.value.body, ANTHROPIC)
    assert caught.value.api_message.startswith("prompt is too long: ")
    with pytest.raises(anthropic.AuthenticationError), official_client(guarded, "wrong") as stranger:
        stranger.messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.batches.list()
    assert unknown.value.type == "not_found_error"
    too_large = post(guarded, system="x" * (9 << 20))
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(Overloaded("Full."), 529, "overloaded_error"), (StepFailed("secret"), 500, "api_error")],
)
def test_errors_of_the_server(server: HttpServer, error: Exception, status: int, kind: str) -> None:
    server.worker.step_error = ErrorInfo.of(error)
    try:
        refused, stream = post(server), post(server, stream=True).text
    finally:
        server.worker.step_error = None
    first, *_, last = sent_events(stream)
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
    assert refused.json()["request_id"] == refused.headers["request-id"]
    assert (first["type"], last["type"], last["error"]["type"]) == ("message_start", "error", kind)
    assert "secret" not in stream + refused.text


CALLED = {"type": "tool_use", "id": "a", "name": "add", "input": "not an object"}


def content(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": blocks}]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "(prefill)"),
        (content({"type": "image", "source": {}}), 'messages[0].content[0].type is "image"'),
        (content({"type": "text"}), "messages[0].content[0].text"),
        (content({"type": "tool_use"}), "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": [CALLED]}, USER]}, "messages[1].content[0].input"),
        (content({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}), "[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 1}}}, "output_config.format"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_errors_name_the_field(server: HttpServer, body: dict[str, Any], named: str) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_what_is_skipped_is_told(server: HttpServer) -> None:
    answer = post(server, tools=[{"type": "bash_20250124", "name": "b"}], context_management={"edits": []})
    told = "tools[0]: tools of type bash_20250124 are skipped; context_management: its edits are skipped"
    assert answer.headers["x-transom-warning"] == told


def test_an_answer_sent_back_with_results_continues_the_chat(speaking_server: HttpServer, speaker: Any) -> None:
    says(speaking_server, ANSWER)
    first = both(speaker)
    thinking, text, *calls = first.content
    assert (thinking.thinking, text.text) == ("Rain?", "Let me look.")
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Paris"}), ("time", {"city": "Rome"})]
    assert len({call.id for call in calls}) == 2
    assert first.usage.output_tokens_details.thinking_tokens == len("\nRain?\n</think>") - 1
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "2 mm"} for call in calls]
    says(speaking_server, "Yes.")
    talk = {"messages": [USER, first.to_param(), {"role": "user", "content": results}]}
    usage = both(speaker, **talk).usage
    counted = speaker.messages.count_tokens(model="stub", tools=CITY_TOOLS, **talk).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, [("thinking", "Rain?"), ("text", "No.")]),
        ({"type": "adaptive", "display": "omitted"}, [("thinking", ""), ("text", "No.")]),
        ({"type": "disabled"}, [("text", "No.")]),
    ],
)
def test_thinking(speaking_server: HttpServer, speaker: Any, thinking: Any, shown: list[tuple[str, str]]) -> None:
    says(speaking_server, "<think>\nRain?\n</think>\n\nNo.")
    answer = both(speaker, thinking=thinking)
    assert [(block.type, getattr(block, block.type)) for block in answer.content] == shown
    if shown[0] == ("thinking", ""):
        assert read_reasoning(answer.content[0].signature) == "Rain?"


@pytest.mark.parametrize(
    ("text", "more", "reason"),
    [
        ("Yes.", {}, ("end_turn", None)),
        ("Yes.", {"max_tokens": 2}, ("max_tokens", None)),
        ("Yes. No.", {"stop_sequences": ["No"]}, ("stop_sequence", "No")),
        (CALL, {}, ("tool_use", None)),
        (f"{CALL} No.", {"stop_sequences": ["No"]}, ("tool_use", None)),
        ("x" * 5000, {"max_tokens": 5000}, ("max_tokens", None)),  # the model's length
    ],
)
def test_stop_reasons(speaking_server: HttpServer, speaker: Any, text: str, more: Any, reason: tuple[str, str]) -> None:
    says(speaking_server, text)
    answer = both(speaker, **more)
    assert (answer.stop_reason, answer.stop_sequence) == reason


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "auto"}])
def test_tool_choices_are_held_by_the_grammar(speaking_server: HttpServer, speaker: Any, choice: Any) -> None:
    says(speaking_server, CALL)
    answer = both(speaker, tool_choice={**choice, "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["tool_use"]
    assert last_request(speaking_server).grammar is not None


def post_response(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"input": "hi", **body}, timeout=120)


def test_a_response(client):
    answer = client.responses.create(**ASKED_RESPONSE, max_output_tokens=4)
    assert answer.id.startswith("resp_")
    assert answer.output_text == "abcd"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 4)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.store is False
    assert answer.output[0].role == "assistant"


def test_sampling_reaches_the_worker(server):
    sampling = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "stop": "z"}
    post_response(server, max_output_tokens=2, **sampling, cache_salt="s", priority=0)
    request = server.worker.submitted[-1]
    assert (request.params.temperature, request.params.top_p, request.seed) == (0.5, 0.25, 7)
    assert (request.params.stop, request.cache_salt, request.params.max_tokens) == (("z",), "s", 2)


def test_what_codex_sends_is_taken(server):
    answer = post_response(
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
    answer = post_response(server, tools=[{"type": "a\r\nx: \u00fc\u2028"}], max_output_tokens=1)
    assert answer.status_code == 200
    assert answer.headers["x-transom-warning"] == "tools[0]: tools of type a??x: ?? are skipped"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
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
        ({"tools": [{"type": "web_search"}, TOOL | {"parameters": 3}]}, "tools[1].parameters"),
    ],
)
def test_errors_name_the_field_of_a_response(server, body, param):
    answer = post_response(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_answer_with_reasoning_and_calls_is_sent_back_with_results(
    speaking_server: HttpServer, speaking_client: Any
) -> None:
    says(speaking_server, ANSWER)
    answer = speaking_client.responses.create(model="stub", input=ASKED_RESPONSE["input"], tools=RESPONSE_TOOLS)
    check_published("Response", answer.to_dict())
    reasoning, message, *calls = answer.output
    assert [item.content[0].text for item in (reasoning, message)] == ["Rain?", "Let me look."]
    asked = [(call.name, json.loads(call.arguments)) for call in calls]
    assert asked == [("weather", {"city": "Paris"}), ("time", {"city": "Rome"})]
    assert (answer.status, answer.output_text) == ("completed", "Let me look.")
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("\nRain?\n</think>") - 1
    assert len({call.call_id for call in calls}) == 2
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2 mm"} for call in calls]
    says(speaking_server, "Yes.")
    chat = [{"role": "user", "content": ASKED_RESPONSE["input"]}, *answer.output, *results]
    assert speaking_client.responses.create(model="stub", tools=RESPONSE_TOOLS, input=chat).output_text == "Yes."


def test_parsed_answers_and_calls(speaking_server: HttpServer, speaking_client: Any) -> None:
    says(speaking_server, '{"city": "Paris", "rain_mm": 2.5}')
    parsed = speaking_client.responses.parse(model="stub", input=ASKED_RESPONSE["input"], text_format=Weather)
    assert parsed.output_parsed == Weather(city="Paris", rain_mm=2.5)
    assert last_request(speaking_server).grammar is not None
    assert last_request(speaking_server).grammar_bytes == 1 << 20  # as the check has measured
    says(speaking_server, CALL)
    tool: Any = openai.pydantic_function_tool(AskWeather, name="weather")
    called = speaking_client.responses.parse(model="stub", input=ASKED_RESPONSE["input"], tools=[tool])
    assert called.output[0].parsed_arguments == AskWeather(city="Paris")
