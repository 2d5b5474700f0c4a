"""OpenAI's and Anthropic's published documents and clients: responses validate strictly, and every published field of a request
is known here: supported, ignored, or refused by its own name."""

import json
from typing import Any, get_type_hints

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.cluster.conftest import stream_events
from tests.cluster.openai.published_document import ANTHROPIC, OPENAI, check_published, published_document
from transom_cluster.openai.openapi_document import POST_ENDPOINTS
from transom_cluster.openai.request.body import BodyParser

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CHATS = [{}, {"n": 3}, {"logprobs": True}, {"n": 2, "logprobs": True, "top_logprobs": 3}, {"max_tokens": 1}]
COMPLETIONS = [{}, {"n": 2, "prompt": ["a", "bc"]}, {"logprobs": 2}, {"echo": True}, {"echo": True, "max_tokens": 0}]


@pytest.mark.parametrize("fields", CHATS, ids=str)
async def test_chats(api, fields):
    whole = ChatCompletion.model_validate_json((await api.chat(**fields)).content, strict=True)
    sent = stream_events((await api.chat(**fields, **STREAMED)).text)
    chunks = [ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True) for event in sent]
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        entries = [entry for c in mine if c.logprobs for entry in c.logprobs.content or ()]
        assert entries == (choice.logprobs.content if choice.logprobs else [])
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("fields", COMPLETIONS, ids=str)
async def test_completions(api, fields):
    answer = await api.complete(**fields)
    check_published("CreateCompletionResponse", answer.json())
    whole = Completion.model_validate_json(answer.content, strict=True)
    *chunks, last = stream_events((await api.complete(**fields, **STREAMED)).text)
    assert whole.usage is not None
    assert (last["choices"], last["usage"]) == ([], whole.usage.model_dump(exclude_none=True))
    prompts = fields.get("prompt", ["hi"])
    num_choices = len(prompts) * fields.get("n", 1)
    assert whole.usage.prompt_tokens == sum(map(len, prompts))
    assert whole.usage.completion_tokens == num_choices * fields.get("max_tokens", 3)
    assert len(whole.choices) == num_choices
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice.index]
        assert "".join(c["text"] for c in mine) == choice.text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice.finish_reason]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    # path: the schema of its published request, and the least body
    "/v1/chat/completions": ("CreateChatCompletionRequest", {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": ("CreateCompletionRequest", {"prompt": "x"}),
    "/v1/responses": ("CreateResponse", {"input": "x"}),
    "/v1/messages": ("CreateMessageParams", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
}


def fields(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return fields(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    own = dict(schema.get("properties", {}))
    for part in schema.get("allOf", ()):
        own |= fields(part, schemas)
    return own


@pytest.mark.parametrize("path", REQUESTS)
def test_every_published_field_is_known_and_null_is_the_default_of_all_but_the_required_ones(path: str) -> None:
    """Clients send null for what they leave out."""
    (model, rules, _), (schema, least) = POST_ENDPOINTS[path], REQUESTS[path]
    schemas = published_document(ANTHROPIC if path == "/v1/messages" else OPENAI)["components"]["schemas"]
    names = set(fields(schemas[schema], schemas))
    if path == "/v1/messages":  # the client has newer ones
        from anthropic.types.message_create_params import MessageCreateParamsBase

        names |= get_type_hints(MessageCreateParamsBase).keys()
    assert len(names) > 15
    assert names <= {*model.__struct_fields__, *rules.ignored, *rules.refused}
    parser = BodyParser(model, rules)
    for name in names - least.keys():
        parser.parse(json.dumps({**least, name: None}).encode())
