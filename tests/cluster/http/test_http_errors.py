"""Each error of a client has its status, OpenAI's error object, and the name of the wrong field."""

import json
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import running_api, sent_events
from tests.cluster.stub_worker import MAX_MODEL_LEN, VOCAB_SIZE, StubWorker, stub_workers
from transom_core.config import MAX_CHOICES, LimitsConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import OutOfMemory, Overloaded, RequestTimeout, RequestTooLarge, StepFailed


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response that has to be a well-formed refusal."""
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 200}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop_token_ids": [10_000]}, "stop_token_ids"),
        ({"logit_bias": {"10000": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"temprature": 1}, "temprature"),
        ({"str": 1}, "str"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"functions": [{}]}, "functions"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"store": 0}, "store"),
        ({"kv_policy": {"type": "window"}}, "kv_policy.window"),
        ({"kv_policy": {"type": "lru"}}, "kv_policy.type"),
        ({"kv_policy": {"type": "window", "window": 8, "budget": 3}}, "kv_policy.budget"),
        ({"kv_policy": {"type": "window", "window": 509}}, "kv_policy.window"),
        ({"kv_policy": {"type": "window", "window": "8"}}, "kv_policy.window"),
        ({"kv_policy": {"type": "heavy", "budget": 513}}, "kv_policy.budget"),
        (
            {"kv_policy": {"type": "adaptive", "min_window": 9, "max_window": 8, "threshold": 0.1}},
            "kv_policy.min_window",
        ),
        ({"kv_policy": "window"}, "kv_policy"),
        ({"kv_quality": True, "kv_policy": {"type": "full"}}, "kv_quality"),
    ],
)
async def test_a_wrong_chat_field_is_named(api, fields, param):
    error = problem(await api.chat(**fields), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.split(".")[-1].split("]")[-1] in error["message"]
    assert api.worker.submitted == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": ["a"] * 513, "n": 2}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt": [[1]] * (MAX_CHOICES + 1)}, "prompt"),
        ({"prompt": [[1]] * (MAX_CHOICES // 128 + 1), "n": 128}, "prompt"),
        ({"n": 129}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", "b" * 1025]}, "stop[1]"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_tokens": 2**31, "max_tokens": None}, "min_tokens"),
        ({"priority": 10**400}, "priority"),
    ],
    ids=str,
)
async def test_a_wrong_completion_field_is_named(api, fields, param):
    error = problem(await api.complete(**fields), 400)
    assert error["param"] == param
    assert len(error["message"]) < 300
    assert api.worker.submitted == []


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": None, "functions": None, "audio": None, "temperature": None, "stop": None, "stream": None},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    ],
)
async def test_harmless_and_neutral_fields_are_accepted(api, fields):
    assert (await api.chat(**fields)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b'{"prompt": "\\ud800"}'])
async def test_a_body_that_is_no_json_object(api, body):
    assert problem(await api.client.post("/v1/completions", content=body), 400)


async def test_any_content_type_is_read_as_json(api):
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends
    assert (await api.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=form)).status_code == 200


async def test_the_error_of_a_too_long_prompt_has_both_lengths(api):
    for asked, words in (
        ({"prompt": "x" * 600}, ("600", str(MAX_MODEL_LEN))),
        ({"prompt": "x" * 500, "max_tokens": 13}, ("12 tokens",)),
    ):
        error = problem(await api.complete(**asked), 400)
        assert error["code"] == "context_length_exceeded"
        assert all(word in error["message"] for word in words)
    assert (await api.complete(prompt="x" * 500, max_tokens=12)).status_code == 200


async def test_unknown_model_path_and_method(api):
    error = problem(await api.complete(model="other"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert problem(await api.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert problem(await api.client.get("/v1/nothing"), 404)["code"] == "not_found"
    response = await api.client.get("/v1/completions")
    assert problem(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full", retry_after_s=2.5), 503, "overloaded"),
        (RequestTooLarge("9 blocks, 3 there are", param="prompt"), 400, "request_too_large"),
        (RequestTimeout("late"), 408, "request_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_refusal_has_its_status_and_code(api, error, status, code, stream):
    api.worker.admission_error = ErrorInfo.of(error)
    response = await api.complete(stream=stream)
    assert problem(response, status).items() >= {"code": code, "message": str(error)}.items()
    assert response.headers.get("retry-after") == ("3" if status == 503 else None)


@pytest.mark.parametrize(
    ("where", "error", "status"),
    [
        ("admission_error", RequestTooLarge("9 blocks, 3 there are", param="prompt"), 400),
        ("step_error", OutOfMemory("this request asked for the most of it: 9 tokens computed"), 503),
    ],
)
async def test_a_request_that_asks_for_too_much_goes_to_no_other_worker(where, error, status):
    """It would do the same there; the other worker has as much memory."""
    async with running_api(*stub_workers(2, **{where: ErrorInfo.of(error)})) as api:
        response = await api.complete()
        assert problem(response, status)["message"] == str(error)
        assert response.headers.get("retry-after") == ("1" if status == 503 else None)
        assert sum(len(worker.submitted) for worker in api.workers) == 1


async def test_an_error_in_mid_stream_is_an_event_and_the_end(api):
    api.worker.step_error = ErrorInfo.of(StepFailed("secret"))
    response = await api.complete(stream=True, n=2)
    assert (response.status_code, sent_events(response.text)[-1]["error"]["code"]) == (200, "step_failed")
    assert "[DONE]" not in response.text
    await api.worker.until(lambda: len(api.worker.aborted) == 1)  # the other choice


async def test_body_limit_by_length_and_while_reading():
    async with running_api(max_body_bytes=1024) as api:
        assert problem(await api.complete(prompt="x" * 1100), 413)["code"] == "request_body_too_large"

        async def pieces():
            for _ in range(20):
                yield b" " * 100

        for path in ("/v1/completions", "/v1/load_lora_adapter", "/update_weights_from_disk"):
            assert problem(await api.client.post(path, content=pieces()), 413)["code"] == "request_body_too_large"
        for length in ("1025", "9" * 5000):
            headers = {"content-length": length}
            assert problem(await api.client.post("/v1/completions", content=b"{}", headers=headers), 413)
        assert (await api.complete()).status_code == 200


@pytest.mark.parametrize("body", [b"", b'{"prompt": "x', b'{"prompt": "x"}'])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
async def test_a_body_that_never_comes_whole_is_not_waited_for(path: str, body: bytes) -> None:
    async with running_api(limits=LimitsConfig(body_timeout_s=0.02)) as api:
        call = api.call(path, {}, body_so_far=body)
        await call.ended()
        assert call.status == 408
        assert (b"connection", b"close") in call.sent[0]["headers"]
        assert "not complete after 0.02 s" in json.loads(call.text)["error"]["message"]
        assert (await api.complete()).status_code == 200  # a whole body, whatever its answer takes


async def test_a_client_may_stay_longer_than_its_body_may_take() -> None:
    """The limit ends with the body: what comes next is that the client leaves. This one's body was there at once."""
    async with running_api(StubWorker(max_events=1), limits=LimitsConfig(body_timeout_s=1e-9)) as api:
        call = api.call("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True})
        await call.begun()
        await call.leave()
        assert call.status == 200
        await api.worker.until(lambda: len(api.worker.aborted) == 1)
