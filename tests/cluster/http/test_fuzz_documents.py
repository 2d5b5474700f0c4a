"""schemathesis sends what two OpenAPI documents allow, and what this server's own document forbids.

Every response of a real engine is as this server's document says. What OpenAI's published document allows and this server does not
take, the server refuses in OpenAI's shape; every other response is as that document says.

schemathesis' own `parametrize` makes the requests of every operation while pytest collects, in each of its processes, whether or
not the test is run there: seconds for each document. So `check_all_operations` makes them while the test runs.
"""

import asyncio
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

from tests.cluster.conftest import num_in_flight
from tests.cluster.engine_server import EngineServer, engine_server
from tests.how_many import ALL_TESTS, num_examples
from transom_cluster.http.api import build_api

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
    check_all_operations(schema, check, subtests, max_examples=num_examples(2, 15))
    assert all(num_good[path, is_stream] for path in ENDED_BY_DONE for is_stream in (False, True))
