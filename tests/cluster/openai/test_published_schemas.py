"""Chat completions, chunks, text completions, models and errors have the shapes of OpenAI's published document.

Additional fields (`reasoning_content`, `kv_quality`) are allowed. tests/cluster/openai/responses has the same for /v1/responses.
"""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from tests.cluster.openai.published_document import check_published
from tests.cluster.openai.scripted_chat import ALL, TALKING, THINKING, WEATHER, call, stream, whole, writer_of
from transom_cluster.openai.answer import response_types

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
