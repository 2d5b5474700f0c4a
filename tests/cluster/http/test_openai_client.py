"""OpenAI's official client, unchanged, over a real socket; with tools, reasoning and structured output, its helpers.

The workers say what the tests give them, so what a model would do is known.
"""

from typing import Any

import openai
from openai.lib.streaming.chat import ChatCompletionStreamEvent

from tests.cluster.conftest import HttpServer
from tests.cluster.http.conftest import ANSWER, CITY, AskWeather, last_request, says

CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
PROMPT_TOKENS = len("user:hi;assistant:")


def test_chat(client):
    answer = client.chat.completions.create(**CHAT, max_tokens=4)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", "stub")
    assert (choice.message.role, choice.message.content) == ("assistant", "abcd")
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 4,
        "total_tokens": PROMPT_TOKENS + 4,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_chat_answers_up_to_the_models_length_by_default(client, server):
    assert client.chat.completions.create(**CHAT).choices[0].message.content == "abcdefghijklmnopqrstuvwxyz"
    request = server.worker.submitted[-1]
    assert request.params.max_tokens is None
    assert request.turn_boundaries == (len("user:hi;"),)


def test_choices_are_requests_of_one_seed(client, server):
    client.chat.completions.create(**CHAT, max_tokens=5, n=3)
    requests = server.worker.submitted[-3:]
    assert [request.choice_index for request in requests] == [0, 1, 2]
    assert {(request.seed, request.params.n) for request in requests} == {(requests[0].seed, 1)}


def test_every_chunk_may_have_the_usage_so_far(client):
    asked = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chat = client.chat.completions.create(**CHAT, **asked)
    text = client.completions.create(model="stub", prompt="hi", **asked)
    counts = [[chunk.usage.completion_tokens for chunk in stream] for stream in (chat, text)]
    # a chat's first chunk has the role, its last but one the finish reason
    assert counts == [[1, 1, 2, 3, 3, 3], [1, 2, 3, 3]]


def test_chat_logprobs(client):
    answer = client.chat.completions.create(**CHAT, max_tokens=2, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "b"]
    assert (content[0].bytes, content[0].logprob) == ([97], -0.5)
    assert [(top.token, top.logprob) for top in content[1].top_logprobs] == [("b", -0.5), ("c", -1.5)]


def test_completion_logprobs_with_echo(client):
    choice = client.completions.create(model="stub", prompt="hé", max_tokens=2, echo=True, logprobs=1).choices[0]
    half, rest = "bytes:\\xc3", "bytes:\\xa9"
    assert (choice.text, choice.logprobs.tokens) == ("héab", ["h", half, rest, "a", "b"])
    assert choice.logprobs.text_offset == [0, 1, 1, 2, 3]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {half: -0.5}, {rest: -0.5}, {"a": -0.5}, {"b": -0.5}]


def test_vllm_fields_reach_the_contract(client, server):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "stop_token_ids": [7],
        "min_tokens": 1,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": 3,
        "cache_salt": "tenant",
    }
    standard = {"max_tokens": 2, "seed": 11, "stop": ["q"], "logit_bias": {"5": 2}}
    client.completions.create(model="stub", prompt="x", **standard, extra_body=extra)
    request = server.worker.submitted[-1]
    params = request.params
    assert (request.seed, request.priority, request.cache_salt) == (11, 3, "tenant")
    assert (params.top_k, params.min_p, params.repetition_penalty, params.stop_token_ids) == (5, 0.1, 1.2, (7,))
    assert (params.min_tokens, params.ignore_eos, params.skip_special_tokens) == (1, True, False)
    assert (params.stop, params.logit_bias, params.include_stop_str_in_output) == (("q",), {5: 2.0}, True)


MESSAGES: Any = [{"role": "user", "content": "Is it raining in Paris?"}]
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]


def test_the_stream_helper_puts_calls_together(speaking_server: HttpServer, speaking_client: openai.OpenAI) -> None:
    says(speaking_server, ANSWER)
    events: list[ChatCompletionStreamEvent[Any]] = []
    strict: Any = [openai.pydantic_function_tool(AskWeather, name=name) for name in ("weather", "time")]
    with speaking_client.chat.completions.stream(model="stub", messages=MESSAGES, tools=strict) as stream:
        events.extend(stream)
        completion = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.index, event.parsed_arguments) for event in done] == [
        ("weather", 0, AskWeather(city="Paris")),
        ("time", 1, AskWeather(city="Rome")),
    ]
    message = completion.choices[0].message
    calls = [call.function.parsed_arguments for call in message.tool_calls or ()]
    assert (message.content, calls) == ("Let me look.", [event.parsed_arguments for event in done])
    assert last_request(speaking_server).grammar is not None  # the helper's tools are strict
