"""Every field that OpenAI's published document gives a request is known here: supported, ignored, or refused by its own name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.openai.published_document import published_document
from transom_cluster.openai.openapi_document import POST_ENDPOINTS
from transom_cluster.openai.request.body import BodyParser

LEAST_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}
SCHEMAS = {
    "/v1/chat/completions": "CreateChatCompletionRequest",
    "/v1/completions": "CreateCompletionRequest",
    "/v1/responses": "CreateResponse",
}


def fields(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return fields(published_document()["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
    own = dict(schema.get("properties", {}))
    for part in schema.get("allOf", ()):
        own |= fields(part)
    return own


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_published_field_is_known_and_null_is_the_default_of_all_but_the_required_ones(path: str) -> None:
    """Clients send null for what they leave out."""
    model, rules, _ = POST_ENDPOINTS[path]
    names = fields(published_document()["components"]["schemas"][SCHEMAS[path]]).keys()
    assert len(names) > 15
    assert names <= {*model.__struct_fields__, *rules.ignored, *rules.refused}
    parser, least = BodyParser(model, rules), LEAST_BODIES[path]
    for name in names - least.keys():
        parser.parse(json.dumps({**least, name: None}).encode())
