"""schemathesis sends what OpenAI's published document allows: what this server does not take it refuses in OpenAI's shape, and
every other response is as that document says."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis import Case, GenerationMode

from tests.cluster.conftest import HttpServer, num_in_flight
from tests.cluster.http.document_requests import check_all_operations
from tests.cluster.openai.published_document import check_event, check_published, published_document
from tests.how_many import num_examples
from transom_cluster.openai.openapi_document import POST_ENDPOINTS

# by path: the method, and the schema of the response
SERVED = {
    "/chat/completions": ("post", "CreateChatCompletionResponse"),
    "/completions": ("post", "CreateCompletionResponse"),
    "/responses": ("post", "Response"),
    "/models": ("get", "ListModelsResponse"),
}


def _served() -> dict[str, Any]:
    """OpenAI's document with the operations that this server has."""
    document = copy.copy(published_document())
    document["paths"] = {path: {method: document["paths"][path][method]} for path, (method, _) in SERVED.items()}
    document.pop("webhooks", None)
    return document


def _names(schema: Any) -> Iterator[str]:
    """The names of all properties, at any depth."""
    if isinstance(schema, list):
        for one in schema:
            yield from _names(one)
    elif isinstance(schema, dict):
        yield from schema.get("properties", ())
        for one in schema.values():
            yield from _names(one)


@cache
def _known() -> frozenset[str]:
    """All names of properties in OpenAI's document."""
    return frozenset(_names(published_document()["components"]["schemas"]))


def _taken(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body without the fields that this server refuses, and without names that OpenAI's document does not have: the document
    forbids no name, and this server forbids all."""
    refused = POST_ENDPOINTS[f"/v1{path}"][1].refused
    known = {name: _with_known_names(value) for name, value in body.items() if name in _known() and name not in refused}
    if not known.get("stream"):
        known.pop("stream_options", None)
    if path == "/responses":
        known.pop("store", None)  # True is refused
    if path != "/chat/completions":
        name = "prompt" if path == "/completions" else "input"
        known[name] = known.get(name) or "a prompt"  # the document requires none
    return {**known, "model": "stub"}  # any other one is 404


def _with_known_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_known_names(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_known_names(one) for name, one in value.items() if name in _known()}
    return value


def _check_stream(path: str, text: str) -> None:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert events
    for event in events:
        if path == "/responses":
            check_event(event)
        elif path == "/chat/completions":
            check_published("CreateChatCompletionStreamResponse", event)
        else:  # the document has one schema for chunks and whole responses, and so no chunk without a finish reason
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            check_published("CreateCompletionResponse", event)


def test_requests_of_the_published_document(server: HttpServer, subtests: pytest.Subtests) -> None:
    def check(case: Case) -> None:
        method, response_schema = SERVED[case.path]
        content = json.dumps(_taken(case.path, case.body)) if isinstance(case.body, dict) else None
        response = httpx.request(method, f"{server.url}/v1{case.path}", content=content, timeout=120)
        if response.status_code != 200:
            assert response.status_code == 400, response.text
            check_published("ErrorResponse", response.json())
        elif response.headers["content-type"].startswith("text/event-stream"):
            _check_stream(case.path, response.text)
        else:
            check_published(response_schema, response.json())
        assert num_in_flight(server.router) == 0

    schema = schemathesis.openapi.from_dict(_served())
    schema.config.generation.update(modes=[GenerationMode.POSITIVE])
    schema.config.phases.coverage.enabled = False  # a thousand variants of fields that are refused by name
    check_all_operations(schema, check, subtests, max_examples=num_examples(5, 500))
