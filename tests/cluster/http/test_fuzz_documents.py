"""schemathesis sends what two OpenAPI documents allow, and what this server's own document forbids.

Every response of a real engine is as this server's document says. What OpenAI's published document allows and this server does not
take, the server refuses in OpenAI's shape; every other response is as that document says.

schemathesis' own `parametrize` makes the requests of every operation while pytest collects, in each of its processes, whether or
not the test is run there: seconds for each document. So `check_all_operations` makes them while the test runs.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.result import Ok
from schemathesis.generation.meta import TestPhase
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema

from tests.cluster.conftest import HttpServer, num_in_flight, sent_events
from tests.cluster.engine_server import EngineServer, engine_server
from tests.cluster.openai.published_document import check_event, check_published, published_document
from tests.how_many import ALL_TESTS, num_examples
from transom_cluster.http.api import build_api
from transom_cluster.openai.openapi_document import POST_ENDPOINTS

KEY = "sesame"
ENDED_BY_DONE = ("/v1/chat/completions", "/v1/completions")
EVENT_STREAM = "text/event-stream"
CLIENT_S = 120
load_all_checks()
CHECKED: list[Any] = [
    check
    for check in CHECKS.get_all()
    if check.__name__ != "positive_data_acceptance"  # a schema cannot say what fits the model's length and vocabulary
]


def check_all_operations(
    schema: BaseSchema, check: Callable[[Case], None], subtests: pytest.Subtests, *, max_examples: int
) -> None:
    """Calls `check` with requests of every operation of the document, `max_examples` of them drawn at random; each operation is a
    subtest."""
    examples = settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for made in get_all_tests(schema=schema, test_func=check, settings=examples, given_kwargs={}):
        assert isinstance(made, Ok), made
        operation, send_all = made.ok()
        with subtests.test(operation.label):
            send_all()


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[EngineServer]:
    """A real engine whose cache holds two of the longest sequences; no request or block is left at the end."""
    settings: dict[str, Any] = {
        "max_model_len": 160,
        "kv_cache_memory_bytes": "256KiB",
        "max_num_seqs": 6,
        "num_threads": 1,
    }
    with engine_server(tiny_model, server={"api_keys": (KEY,)}, **settings) as running:
        yield running
        asyncio.run(running.until_quiet())


def is_left_out(case: Case) -> bool:
    """19 of 20 of the thousands of bodies that schemathesis makes of each field in turn: `make test-all` sends them too."""
    assert case.meta is not None
    if ALL_TESTS or case.method != "POST" or case.meta.phase.name is not TestPhase.COVERAGE:
        return False
    return zlib.crc32(repr((case.path, case.headers, case.query, case.body)).encode()) % 20 != 0


def check_content(path: str, content_type: str, text: str) -> None:
    """No error of the server's own, even inside a stream that began well; JSON without NaN and infinities; a stream has its end."""
    assert not re.search(r'"type": ?"(server|api)_error"', text), text
    if content_type.startswith(EVENT_STREAM):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if path in ENDED_BY_DONE:
            assert text.endswith("data: [DONE]\n\n"), text
            lines.pop()
    else:
        lines = [text] if content_type.startswith("application/json") else []
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_every_response_is_as_the_document_says(guarded: EngineServer, subtests: pytest.Subtests) -> None:
    def check(case: Case) -> None:
        assert case.meta is not None
        if is_left_out(case):
            return
        body = case.body
        if case.meta.generation.mode is GenerationMode.POSITIVE and isinstance(body, dict):
            body["model"] = "tiny"  # any other one is 404
            if case.path in ENDED_BY_DONE and body.get("stream") is None:
                body["stream"] = num_good[case.path, True] <= num_good[case.path, False]
        # A route ignores query parameters that it does not know, and `headers` replace wrong ones.
        unknown = set(case.query or ()) - {parameter.name for parameter in case.operation.query}
        has_other_fault = any(
            case.meta.is_negative_at(place) for place in (ParameterLocation.BODY, ParameterLocation.PATH)
        )
        ignored = unknown and not has_other_fault
        checks = [one for one in CHECKED if not (ignored and one.__name__ == "negative_data_rejection")]
        headers = {"Authorization": f"Bearer {KEY}"}
        response = case.call_and_validate(base_url=guarded.url, headers=headers, checks=checks, timeout=CLIENT_S)
        content_type = response.headers.get("content-type", [""])[0]
        check_content(case.path, content_type, response.text)
        num_good[case.path, content_type.startswith(EVENT_STREAM)] += response.status_code == 200
        assert num_in_flight(guarded.router) == 0

    num_good: Counter[tuple[str, bool]] = Counter()  # answers with status 200, by path and whether they were streams
    schema = schemathesis.openapi.from_dict(build_api(guarded.router).openapi())
    schema.config.max_stream_events = 10**6  # every stream is read to its end
    check_all_operations(schema, check, subtests, max_examples=num_examples(3, 15))
    assert all(num_good[path, is_stream] for path in ENDED_BY_DONE for is_stream in (False, True))


CONTENT_TYPES = ["application/json", "text/plain", "multipart/form-data; boundary=x", "", "é\t;;"]


def test_bodies_with_broken_bytes(guarded: EngineServer) -> None:
    """A body that ends too early or has a wrong byte is refused or answered, whatever type of content it says it is."""
    body = {
        "messages": [{"role": "user", "content": "café"}],
        "logit_bias": {"7": 1.5},
        "stop": ["x"],
        "stream": True,
        "max_tokens": 2,
    }
    whole = json.dumps(body, ensure_ascii=False).encode()
    rng = random.Random(0)
    statuses = set()
    with httpx.Client(base_url=guarded.url, timeout=CLIENT_S) as client:
        for number in range(num_examples(20, 200)):
            at = rng.randrange(len(whole))
            rest = b"" if number % 4 == 0 else bytes([rng.randrange(256)]) + whole[at + 1 :]
            content_type = CONTENT_TYPES[number % len(CONTENT_TYPES)]
            headers = {b"Authorization": f"Bearer {KEY}".encode(), b"Content-Type": content_type.encode()}
            response = client.post(ENDED_BY_DONE[0], content=whole[:at] + rest, headers=headers)
            check_content(ENDED_BY_DONE[0], response.headers["content-type"], response.text)
            statuses.add(response.status_code)
            if response.status_code != 200:
                error = response.json()["error"]
                assert error.keys() == {"message", "type", "param", "code"}
                assert error["message"]
    assert statuses == {200, 400}


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
    events = sent_events(text)
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


@pytest.mark.exhaustive  # daily, test_wire_shapes compares fields and responses with the document
def test_requests_of_the_published_document(server: HttpServer, subtests: pytest.Subtests) -> None:
    def check(case: Case) -> None:
        method, response_schema = SERVED[case.path]
        content = json.dumps(_taken(case.path, case.body)) if isinstance(case.body, dict) else None
        response = httpx.request(method, f"{server.url}/v1{case.path}", content=content, timeout=CLIENT_S)
        if response.status_code != 200:
            assert response.status_code == 400, response.text
            check_published("ErrorResponse", response.json())
        elif response.headers["content-type"].startswith(EVENT_STREAM):
            _check_stream(case.path, response.text)
        else:
            check_published(response_schema, response.json())
        assert num_in_flight(server.router) == 0

    schema = schemathesis.openapi.from_dict(_served())
    schema.config.generation.update(modes=[GenerationMode.POSITIVE])
    schema.config.phases.coverage.enabled = False  # a thousand variants of fields that are refused by name
    check_all_operations(schema, check, subtests, max_examples=500)
