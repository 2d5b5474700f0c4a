"""schemathesis sends what the OpenAPI document allows and forbids: every response is as the document says."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation.meta import TestPhase

from tests.cluster.conftest import HttpServer, http_server, make_router, num_in_flight
from tests.cluster.http.document_requests import check_all_operations
from tests.cluster.stub_worker import StubWorker
from tests.how_many import ALL_TESTS, num_examples
from transom_cluster.http.api import build_api

KEY = "sesame"
load_all_checks()
CHECKED: list[Any] = [
    check
    for check in CHECKS.get_all()
    if check.__name__ != "positive_data_acceptance"  # a schema cannot say what fits the model's length and vocabulary
]


@pytest.fixture(scope="module")
def guarded():
    with http_server(api_keys=(KEY,)) as running:
        yield running


def is_left_out(case: Case) -> bool:
    """19 of 20 of the thousands of bodies that schemathesis makes of each field in turn: `make test-all` sends them too."""
    assert case.meta is not None
    if ALL_TESTS or case.method != "POST" or case.meta.phase.name is not TestPhase.COVERAGE:
        return False
    return zlib.crc32(repr((case.path, case.headers, case.query, case.body)).encode()) % 20 != 0


def test_every_response_is_as_the_document_says(guarded: HttpServer, subtests: pytest.Subtests) -> None:
    def check(case: Case) -> None:
        assert case.meta is not None
        if is_left_out(case):
            return
        if case.meta.generation.mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["model"] = "stub"  # any other one is 404
        case.call_and_validate(
            base_url=guarded.url, headers={"Authorization": f"Bearer {KEY}"}, checks=CHECKED, timeout=120
        )
        assert num_in_flight(guarded.router) == 0

    schema = schemathesis.openapi.from_dict(build_api(make_router(StubWorker(), api_keys=(KEY,))).openapi())
    check_all_operations(schema, check, subtests, max_examples=num_examples(3, 15))
