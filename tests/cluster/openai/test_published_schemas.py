"""Chat completions, chunks, text completions, models and errors have the shapes of OpenAI's published document.

Additional fields (`reasoning_content`, `kv_quality`) are allowed. tests/cluster/openai/responses has the same for /v1/responses.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.cluster.conftest import Api
from tests.cluster.openai.published_document import check_published
from tests.cluster.openai.scripted_chat import ALL, TALKING, THINKING, WEATHER, call, stream, whole, writer_of
from transom_cluster.openai.answer import response_types
from transom_core.contract import ErrorInfo
from transom_core.errors import StepFailed

SCRIPTS = {
    "text": TALKING,
    "reasoning alone": THINKING,
    "a call alone": WEATHER,
    "everything": ALL,
    "a call without its end": call(0, "f", "{", is_complete=False),
}


@pytest.mark.parametrize("num_top", [None, 0], ids=["", "logprobs"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_parsed_chat_completions(script: str, num_top: int | None) -> None:
    steps = SCRIPTS[script]
    answer = whole(writer_of(steps, steps, num_top_logprobs=num_top), steps, steps, logprobs=num_top is not None)
    check_published("CreateChatCompletionResponse", answer)
    TypeAdapter(response_types.ChatCompletion).validate_python(answer, strict=True)  # what /openapi.json says of it
    for per_event in (1, 3):
        writer = writer_of(steps, steps, num_top_logprobs=num_top)
        for chunk in stream(writer, steps, steps, per_event=per_event, logprobs=num_top is not None):
            check_published("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2}], ids=["", "logprobs"])
async def test_plain_chat_completions(api: Api, more: dict[str, Any]) -> None:
    check_published("CreateChatCompletionResponse", (await api.chat(**more)).json())
    streamed = await api.chat(**more, stream=True, stream_options={"include_usage": True})
    for chunk in chunks_of(streamed.text):
        check_published("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}], ids=["", "logprobs"])
async def test_text_completions(api: Api, more: dict[str, Any]) -> None:
    check_published("CreateCompletionResponse", (await api.complete(**more)).json())


async def test_models(api: Api) -> None:
    check_published("ListModelsResponse", (await api.client.get("/v1/models")).json())
    check_published("Model", (await api.client.get("/v1/models/stub")).json())


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 200},
        {"model": "other"},
        {"nonsense": 1},
        {"messages": []},
        {"max_tokens": 100_000},
        {"n": "two"},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_errors(api: Api, body: dict[str, Any]) -> None:
    answer = await api.chat(**body)
    assert answer.status_code in (400, 404)
    check_published("ErrorResponse", answer.json())


async def test_an_error_in_a_stream(api: Api) -> None:
    api.worker.step_error = ErrorInfo.of(StepFailed("the device fell over"))
    text = (await api.chat(stream=True)).text
    *chunks, error = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-1]]
    check_published("ErrorResponse", error)
    for chunk in chunks:
        check_published("CreateChatCompletionStreamResponse", chunk)


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
